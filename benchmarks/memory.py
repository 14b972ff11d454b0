"""How much memory a trainer, its agent and the RAM tier take together, at the most."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

import psutil

SAMPLE_SECS = 0.02


class PeakMemory:
    """Samples, while the block runs, this process's and its agents' own memory and tmpfs bytes.

    `peak_bytes` is the most seen over `before`, which was taken before the checkpointer was opened.

    Args:
        before: what `of_now` returned.
        with_children: count the processes that this one starts too, with the memory they share.
    """

    def __init__(self, before: tuple[int, Path], *, with_children: bool = False) -> None:
        self._before_bytes, self._directory = before
        self._with_children = with_children
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
            if self._with_children:
                used += _children_bytes()
            self.peak_bytes = max(self.peak_bytes, used)


def agents(directory: Path | str) -> list[psutil.Process]:
    """The agents of a run at a path or a URL; none where the system has no such thing."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if "holdfast.host" in (p.info["cmdline"] or []) and str(directory) in p.info["cmdline"][-1]
    ]


def _children_bytes() -> int:
    """Memory of this process's children, and what it shares with them by unnamed files."""
    own = psutil.Process()
    children = own.children(recursive=True)
    return _sum_of(own, "Pss_Shmem:") + sum(
        _sum_of(child, "Pss_Anon:", "Pss_Shmem:") for child in children
    )


def _sum_of(process: psutil.Process, *members: str) -> int:
    """Bytes by `smaps_rollup`; 0 for a process that has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(members))
    return 0


def _in_use_bytes(processes: list[psutil.Process]) -> int:
    """Private memory of the processes, and what stands in the RAM tier's folder."""
    own = sum(_sum_of(process, "Pss_Anon:") for process in processes)
    ram = os.environ.get("HOLDFAST_RAM")
    slots = (
        sum(s.st_blocks * 512 // s.st_nlink for s in (p.stat() for p in Path(ram).rglob("*")))
        if ram
        else 0
    )
    return own + slots
