"""Trainings under `holdfast run` that fail on purpose: what is said of each end, and when."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.cli.command_line import INTERRUPTIBLE
from tests.hosts import Host, host
from tests.trust.cgroups import MemoryGroup

JOBS = int(os.environ.get("ZOO_JOBS", "4"))
"""How many trainings run at the same time: most of their time is waiting."""
SECS_MAX = 1200.0

_END = re.compile(r"run: exit code (\d+); (restart .*?|not restarted: .*); (\w+): (.*)")
_HELD = re.compile(r"run: rank (\d+), process (\d+), is stopped")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Line:
    """A line of `holdfast run`, and when it was there."""

    text: str
    time_secs: float


@dataclass(frozen=True)
class Ran:
    """A training that has ended.

    `ends` are the classes of its ends that were told, `hangs` the lines of hangs, `held` those of
    stopped processes, and `faults` the kinds of its faults and their times.
    """

    code: int
    lines: list[Line]
    faults: list[tuple[str, float]]

    @property
    def ends(self) -> list[str]:
        return [match[3] for line in self.lines if (match := _END.search(line.text))]

    @property
    def hangs(self) -> list[Line]:
        return [line for line in self.lines if "holdfast run: hang: " in line.text]

    @property
    def held(self) -> list[Line]:
        return [line for line in self.lines if _HELD.search(line.text)]

    @property
    def told(self) -> str:
        return "".join(line.text for line in self.lines)


def run_training(
    own: Host,
    run: Path,
    options: Sequence[object],
    command: Sequence[str],
    group: MemoryGroup | None = None,
) -> Ran:
    """Trains to the end under `holdfast run`, and continues each process that it calls stopped.

    Args:
        own: The host.
        run: The run's directory.
        options: Those of `holdfast run`.
        command: The training.
        group: The cgroup of all its processes.
    """
    words = [sys.executable, "-c", INTERRUPTIBLE, "run", *map(str, options), "--", *command]
    if group is not None:
        entering = f'echo $$ > {group.folder}/cgroup.procs && exec "$@"'
        words = ["sh", "-c", entering, "sh", *words]
    lines = []
    with subprocess.Popen(
        words,
        env=own.environment | {"XDG_CACHE_HOME": str(run.parent / "cache")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        overdue = threading.Timer(SECS_MAX, process.kill)
        overdue.start()
        for text in process.stderr:
            lines.append(Line(text, time.monotonic()))
            if (match := _HELD.search(text)) is not None:
                os.kill(int(match[2]), signal.SIGCONT)
        overdue.cancel()
    noted = Path(f"{run}.faults")
    faults = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    return Ran(process.returncode, lines, [(kind, secs) for kind, secs in faults])


def run_all(trainings: Sequence[Callable[[Host], Result]]) -> list[Result]:
    """Runs trainings side by side, each on a host of its own; returns their results in order."""

    def run_one(training: Callable[[Host], Result]) -> Result:
        with host() as own:
            return training(own)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(run_one, trainings))


def delays_secs(ran: Ran, told: Sequence[Line], kinds: Sequence[str]) -> Iterator[float]:
    """Yields how long after each fault of these kinds its line was there."""
    for (_, fault_secs), line in zip(
        (fault for fault in ran.faults if fault[0] in kinds), told, strict=True
    ):
        yield line.time_secs - fault_secs
