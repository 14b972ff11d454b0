"""What a run of the demo shall do, and what its hosts are called.

Several hosts stand on one machine: each has a name of its own, and so an agent and memory of its
own, and one trainer process. A host that is alone keeps the machine's name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.agent_directory import HOST_VARIABLE, host_name
from holdfast.demo.failures import Failure
from holdfast.job.options import INTERFACE_VARIABLE
from holdfast.peers.config import LOOPBACK

HOSTS_MAX = 8
"""As many as one machine is asked to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What a run shall do, and what shall happen to it."""

    name: str
    folder: Path
    steps: int
    seed: int
    interval_secs: float
    hosts: int = 1
    failures: tuple[Failure, ...] = ()

    @property
    def run(self) -> Path:
        """The run's durable directory."""
        return self.folder / self.name

    def journal(self, host: int) -> Path:
        """What the trainers of a host write for the demo."""
        return self.folder / f"{self.name}{self._suffix(host)}.jsonl"

    def output(self, host: int) -> Path:
        """What the trainers of a host print."""
        return self.folder / f"{self.name}{self._suffix(host)}.log"

    def host(self, host: int) -> str:
        """The name of a host."""
        return host_name() if self.hosts == 1 else f"host-{host}"

    def environment(self, host: int) -> dict[str, str]:
        """What the trainers of a host find in their environment."""
        # The proof compares bits, and on an accelerator equal bits take special settings.
        if self.hosts == 1:
            return {"JAX_PLATFORMS": "cpu", **os.environ}
        # Several processes cannot share an accelerator.
        own = {HOST_VARIABLE: self.host(host), INTERFACE_VARIABLE: LOOPBACK, "JAX_PLATFORMS": "cpu"}
        return {**os.environ, **own}

    def _suffix(self, host: int) -> str:
        return "" if self.hosts == 1 else f"-{self.host(host)}"
