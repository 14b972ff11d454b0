"""Gather the stacks of a hanging training's processes, and keep them with its run.

A trainer, and each process that it has forked, writes the stacks of its threads itself when it gets
`STACKS_SIGNAL` (`trainer.process.stack_dumps`). Of others py-spy is asked, where it is installed.
Every wait has a bound: the training hangs, and is to be restarted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.clock import Clock
from holdfast.observe.events.segments import open_event_file, open_folder
from holdfast.store.location import RunLocation
from holdfast.trainer.process.stack_dumps import STACKS_SIGNAL, stacks_file

WRITTEN_SECS, QUIET_SECS, PAUSE_SECS = 2.0, 0.1, 0.02
"""How long a process may take to write its stacks, and after which pause they are whole."""
PY_SPY_SECS = 5.0
PROCESSES_MAX = 64
TEXT_SIZE_MAX_BYTES = 1024 * 1024
FILES_MAX = 8
"""How many files of stacks a host keeps in a run."""
FRAMES_SHOWN = 12

_IN_COLLECTIVE = re.compile(r"torch/distributed/|multihost_utils|/mpi4py/|/horovod/")
_CURRENT = re.compile(r"^Current thread .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStacks:
    """The stacks of one process; `rank` is that of its trainer."""

    rank: int
    pid: int
    is_trainer: bool
    text: str

    @property
    def title(self) -> str:
        """Which process it is."""
        return f"rank {self.rank}, {'' if self.is_trainer else 'its '}process {self.pid}"

    @property
    def is_in_collective(self) -> bool:
        """Whether the thread that was interrupted, the main one, waits for other ranks."""
        return self.is_trainer and _IN_COLLECTIVE.search(self.main_thread) is not None

    @property
    def main_thread(self) -> str:
        """The innermost frames of that thread; of all threads, if it is not known."""
        current = _CURRENT.search(self.text)
        lines = self.text[current.start() if current else 0 :].splitlines()
        end = next((n for n, line in enumerate(lines) if n and not line.startswith("  ")), None)
        return "\n".join(lines[: min(end or len(lines), FRAMES_SHOWN)])


def gather_stacks(ranks: Mapping[int, int], folder: Path, clock: Clock) -> list[ProcessStacks]:
    """Return the stacks of trainers and of the processes that they have started.

    Args:
        ranks: The process of each rank.
        folder: The folder of the trainers' reports.
        clock: The clock.
    """
    stacks: list[ProcessStacks] = []
    for rank, pid in sorted(ranks.items()):
        for own in [pid, *_children(pid)][: PROCESSES_MAX - len(stacks)]:
            text = _written_by(own, stacks_file(folder, pid), clock) or _by_py_spy(own)
            missing = "no stacks: it does not answer the signal, and py-spy shows none"
            stacks.append(
                ProcessStacks(rank=rank, pid=own, is_trainer=own == pid, text=text or missing)
            )
    return stacks


def _children(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _written_by(pid: int, path: Path, clock: Clock) -> str:
    """Return what a process writes after the signal; empty: it has no handler, or is too slow."""
    if not _catches_signal(pid):
        return ""
    try:
        before = path.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return ""
    until_secs, size, grown_secs = clock.monotonic() + WRITTEN_SECS, before, 0.0
    while clock.monotonic() < until_secs:
        clock.sleep(PAUSE_SECS)
        now_size = path.stat().st_size
        if now_size != size:
            size, grown_secs = now_size, clock.monotonic()
        elif size > before and clock.monotonic() - grown_secs >= QUIET_SECS:
            break
    with path.open("rb") as file:
        file.seek(before)
        return file.read(TEXT_SIZE_MAX_BYTES).decode(errors="replace")


def _catches_signal(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _by_py_spy(pid: int) -> str:
    # Installed beside Holdfast, it is on no PATH unless the environment is activated.
    own = os.path.dirname(sys.executable)
    program = shutil.which("py-spy") or shutil.which("py-spy", path=own)
    if program is None:
        return ""
    command = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PY_SPY_SECS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def keep_stacks(run: str, name: str, text: str) -> None:
    """Write a file of stacks into the run's events, and remove the host's oldest ones.

    Args:
        run: The run's path or URL.
        name: The name of the file, `stacks-HOST-TIME.txt`.
        text: Its content.

    Raises:
        OSError: It cannot be written.
    """
    folder = RunLocation(run).folder
    fd = open_event_file(folder, name)
    with os.fdopen(fd, "wb") as file:
        file.write(text.encode()[:TEXT_SIZE_MAX_BYTES])
    prefix = name.rpartition("-")[0] + "-"
    with open_folder(folder) as folder_fd:
        own = sorted(
            entry
            for entry in os.listdir(folder_fd)
            # The name of another host may begin with this one's.
            if entry.startswith(prefix) and len(entry) == len(name)
        )
        for old in own[:-FILES_MAX]:
            os.unlink(old, dir_fd=folder_fd)


def shown_lines(stacks: list[ProcessStacks]) -> Iterator[str]:
    """Yield the lines that show each trainer's main thread."""
    for process in stacks:
        if process.is_trainer:
            yield f"{process.title}:"
            yield from (f"  {line}" for line in process.main_thread.splitlines())
