"""Define the options of the demo, the plan of each of its runs, and the names of its hosts.

Several hosts are simulated on one machine: each has its own name, and therefore its own agent, RAM
tier and trainer process. A single host has the machine's name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.demo.failures import Failure
from holdfast.demo.learner import FRAMEWORKS, TrainerOptions
from holdfast.environment import HOST_VARIABLE, INTERFACE_VARIABLE
from holdfast.local_agent.place import host_name
from holdfast.peers.config import LOOPBACK

HOSTS_MAX = 8
"""How many hosts one machine simulates at most."""
STEPS = 192
STEPS_OF_HOSTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the demo.

    Attributes:
        directory: The folder for all files; None for a new temporary one.
        url: The URL below which the durable tiers of both runs lie; None for the folder.
        hosts: The number of hosts of each run.
        framework: `jax` or `torch`.
        steps: The training steps of each run; None for as many as take about a minute.
        seed: Determines the failures, the initial weights and the order of batches.
        kill_agent: Whether the agent is killed too.
        interval_secs: The shortest time between two checkpoints.
        as_json: Whether the result is printed to standard output as a JSON document.
    """

    directory: Path | None = None
    url: str | None = None
    hosts: int = 1
    framework: str = FRAMEWORKS[0]
    steps: int | None = None
    seed: int = 0
    kill_agent: bool = False
    interval_secs: float = 1.0
    as_json: bool = False

    @property
    def step_count(self) -> int:
        """The training steps of each run."""
        return self.steps or (STEPS if self.hosts == 1 else STEPS_OF_HOSTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The plan of one of the runs: the options, its place, and its failures."""

    options: DemoOptions
    name: str
    folder: Path
    place: str
    """The path or URL below which the runs lie."""
    failures: tuple[Failure, ...] = ()

    @property
    def run(self) -> str:
        """The run's durable directory, or its URL."""
        return f"{self.place}/{self.name}"

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.options.hosts

    def trainer(self, host: int, coordinator: str) -> TrainerOptions:
        """Return the options of a host's trainer."""
        options = self.options
        return TrainerOptions(
            run=self.run,
            journal=str(self.journal(host)),
            steps=options.step_count,
            framework=options.framework,
            seed=options.seed,
            interval_secs=options.interval_secs,
            hosts=options.hosts,
            host=host,
            coordinator=coordinator,
        )

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
