"""How much memory a trainer, its agent and the RAM tier take together, at the most."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import psutil

SAMPLE_SECS = 0.02


class PeakMemory:
    """Samples, while the block runs, this process's and its agents' own memory and tmpfs bytes.

    `peak_bytes` is the most seen over `before`, which was taken before the checkpointer was opened.
    """

    def __init__(self, before: tuple[int, Path]) -> None:
        self._before_bytes, self._directory = before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.peak_bytes = 0

    @staticmethod
    def of_now(directory: Path) -> tuple[int, Path]:
        """The memory now, and the run whose agent belongs to it."""
        return _in_use_bytes([psutil.Process()]), directory

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        processes = [psutil.Process(), *agents(self._directory)]
        while not self._stop.wait(SAMPLE_SECS):
            used = _in_use_bytes(processes) - self._before_bytes
            self.peak_bytes = max(self.peak_bytes, used)


def agents(directory: Path) -> list[psutil.Process]:
    """The agents of a run; none where the system has no such thing."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if "holdfast.agent" in (p.info["cmdline"] or []) and str(directory) in p.info["cmdline"][-1]
    ]


def _in_use_bytes(processes: list[psutil.Process]) -> int:
    """Private memory of the processes, and what stands in the RAM tier's folder."""
    own = 0
    for process in processes:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                own += int(line.split()[1]) * 1024
    ram = os.environ.get("HOLDFAST_RAM")
    slots = (
        sum(s.st_blocks * 512 // s.st_nlink for s in (p.stat() for p in Path(ram).rglob("*")))
        if ram
        else 0
    )
    return own + slots
