"""Define the plan of a run of the demo, and the names of its hosts.

Several hosts are simulated on one machine: each has its own name, and therefore its own agent, RAM
tier and trainer process. A single host has the machine's name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.demo.failures import Failure
from holdfast.local_agent.place import HOST_VARIABLE, host_name
from holdfast.peers.config import LOOPBACK
from holdfast.trainer.options import INTERFACE_VARIABLE

HOSTS_MAX = 8
"""How many hosts one machine simulates at most."""


FRAMEWORKS = ("jax", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The plan of a run: its size and its failures."""

    name: str
    folder: Path
    steps: int
    seed: int
    interval_secs: float
    hosts: int = 1
    framework: str = FRAMEWORKS[0]
    failures: tuple[Failure, ...] = ()
    place: str = ""
    """The URL below which the runs lie; empty for the folder."""

    @property
    def run(self) -> str:
        """The run's durable directory, or its URL."""
        return f"{self.place or self.folder}/{self.name}"

    def journal(self, host: int) -> Path:
        """Return the path of the journal of a host's trainers."""
        return self.folder / f"{self.name}{self._suffix(host)}.jsonl"

    def output(self, host: int) -> Path:
        """Return the path of the output of a host's trainers."""
        return self.folder / f"{self.name}{self._suffix(host)}.log"

    def host(self, host: int) -> str:
        """Return the name of a host."""
        return host_name() if self.hosts == 1 else f"host-{host}"

    def environment(self, host: int) -> dict[str, str]:
        """Return the environment of a host's trainers."""
        # The demo compares bits, and accelerators compute equal bits only with special settings.
        if self.hosts == 1:
            return {"JAX_PLATFORMS": "cpu", **os.environ}
        # Several processes cannot share an accelerator.
        own = {HOST_VARIABLE: self.host(host), INTERFACE_VARIABLE: LOOPBACK}
        own |= {"JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        return {**os.environ, **own}

    def _suffix(self, host: int) -> str:
        return "" if self.hosts == 1 else f"-{self.host(host)}"
