"""The place of one benchmark run: its folders, its environment, and its workers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

WORKER_SECS = 900.0


@dataclass
class Bench:
    """`disk` is a folder on a disk, `ram` one on a tmpfs; each is measured `rounds` times."""

    disk: Path
    ram: Path
    rounds: int
    scale: float

    def worker(self, task: str, *, devices: int = 1, **arguments: Any) -> dict[str, Any]:
        """Runs one task in a process of its own; its answer."""
        done = self._run(task, devices, arguments)
        if done.returncode:
            raise RuntimeError(f"{task} {arguments} failed:\n{done.stderr[-3000:]}")
        return self._answer(done)

    def killed_worker(self, task: str, *, devices: int = 1, **arguments: Any) -> dict[str, Any]:
        """The same of a task that ends with SIGKILL, as a crash does."""
        done = self._run(task, devices, arguments)
        if done.returncode != -signal.SIGKILL:
            raise RuntimeError(f"{task} {arguments} was to be killed:\n{done.stderr[-3000:]}")
        return self._answer(done)

    @contextlib.contextmanager
    def directory(self, *, in_ram: bool = False) -> Iterator[str]:
        """A directory for one run; what is left of it, its agent too, ends with the block."""
        folder = tempfile.mkdtemp(dir=self.ram if in_ram else self.disk)
        try:
            yield f"{folder}/run"
        finally:
            self.end_agents()
            shutil.rmtree(folder)

    def end_agents(self) -> None:
        """Ends the agents of this benchmark, and what they held in RAM."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "holdfast.host" in command and str(self.ram) in command[-1]:
                process.kill()
                process.wait()
        shutil.rmtree(self.ram / "holdfast", ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the benchmark is given."""
        own = {
            "HOLDFAST_RAM": str(self.ram / "holdfast"),
            "HOLDFAST_HOST": "bench",
            "JAX_PLATFORMS": "cpu",
        }
        return os.environ | own

    def _run(
        self, task: str, devices: int, arguments: dict[str, Any]
    ) -> subprocess.CompletedProcess[str]:
        own = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            # Every round has the same steps; one on 20,000 leaves takes 43 s to compile.
            "JAX_COMPILATION_CACHE_DIR": str(self.ram / "compiled"),
        }
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.worker", task, json.dumps(arguments)],
            env=self.environment | own,
            capture_output=True,
            text=True,
            timeout=WORKER_SECS,
            check=False,
        )

    def _answer(self, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


@contextlib.contextmanager
def bench(rounds: int, scale: float, disk: Path) -> Iterator[Bench]:
    """A benchmark's place; all of it goes with the block."""
    disk = disk.absolute()
    disk.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=disk) as on_disk,
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm") as in_ram,
    ):
        made = Bench(Path(on_disk), Path(in_ram), rounds, scale)
        try:
            yield made
        finally:
            made.end_agents()


def median_of(rounds: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> float:
    """The median over rounds of one figure."""
    return statistics.median(map(figure, rounds))
