"""The faults: what is done to a program, or to what it left, at the last save."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.faults.libraries import COUNT, ELEMENTS

STATE_BYTES = 4 * COUNT * ELEMENTS
WAIT_SECS = 60.0


class NotTriedError(Exception):
    """The fault cannot be had with this library, or on this machine."""


@dataclass
class Trial:
    """What a fault acts on.

    Attributes:
        place: The directory of the checkpoints, on a file system of its own.
        ram: Holdfast's memory.
        process: The program that saves.
    """

    place: Path
    ram: Path
    process: subprocess.Popen[str]
    sizes: dict[Path, int] = field(default_factory=dict)

    def files(self) -> list[Path]:
        """Return the files of the place."""
        return [path for path in self.place.rglob("*") if path.is_file()]

    def new_files(self) -> list[Path]:
        """Return those that the last save wrote, the largest first."""
        found = [path for path in self.files() if path not in self.sizes]
        return sorted(found, key=lambda path: -path.stat().st_size)


@dataclass(frozen=True)
class Fault:
    """What happens at which moment; None: nothing."""

    before: Callable[[Trial], None] | None = None
    while_saving: Callable[[Trial], None] | None = None
    after: Callable[[Trial], None] | None = None
    finished: Callable[[Trial], None] | None = None
    ends_without_wait: bool = False
    in_bucket: bool = False


def _fill(trial: Trial) -> None:
    """Leave room for half of a state."""
    free = shutil.disk_usage(trial.place).free
    with open(trial.place.parent / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free - STATE_BYTES // 2)


def _refuse_files(trial: Trial) -> None:
    """Let no file be created or removed, by root neither."""
    _set_immutable(trial, "+i")


def _set_immutable(trial: Trial, attribute: str) -> None:
    folders = [trial.place, *(path for path in trial.place.rglob("*") if path.is_dir())]
    done = subprocess.run(["chattr", attribute, *folders], capture_output=True, check=False)
    if done.returncode:
        raise NotTriedError("this file system knows no immutable folders")


def _allow_files(trial: Trial) -> None:
    _set_immutable(trial, "-i")


def _kill_writer(trial: Trial) -> None:
    """Kill the processes that the library writes with."""
    found = [*_agents(trial), *psutil.Process(trial.process.pid).children(recursive=True)]
    writers = [one for one in found if not _is_helper(one)]
    if not writers:
        raise NotTriedError("it writes in the program's own process")
    for writer in writers:
        with contextlib.suppress(psutil.NoSuchProcess):
            writer.kill()


def _is_helper(process: psutil.Process) -> bool:
    """Return whether it only serves Python's multiprocessing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("resource_tracker" in word for word in process.cmdline())
    return True


def _agents(trial: Trial) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "holdfast.host" in command and str(trial.ram) in command[-1]:
            yield process


def _kill_program(trial: Trial) -> None:
    """Kill the program once the last save has begun to write, or its call has returned."""
    before = sum(path.stat().st_size for path in trial.files())
    deadline = time.monotonic() + WAIT_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if sum(path.stat().st_size for path in trial.files()) > before + 4096:
                break
    trial.process.send_signal(signal.SIGKILL)


def _remove(trial: Trial) -> None:
    shutil.rmtree(trial.place, ignore_errors=True)


def lose_ram(trial: Trial) -> None:
    """End Holdfast's agent and its memory, as the loss of the host does."""
    for agent in _agents(trial):
        agent.kill()
        agent.wait()
    shutil.rmtree(trial.ram, ignore_errors=True)


def _flip(trial: Trial) -> None:
    lose_ram(trial)
    target = trial.new_files()[0]
    with open(target, "r+b") as file:
        file.seek(target.stat().st_size * 3 // 8)  # amid an array
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _truncate(trial: Trial) -> None:
    lose_ram(trial)
    target = trial.new_files()[0]
    os.truncate(target, target.stat().st_size // 2)


def _lose_file(trial: Trial) -> None:
    lose_ram(trial)
    trial.new_files()[0].unlink()


FAULTS = {
    "none": Fault(),
    "disk full": Fault(before=_fill),
    "no file can be created": Fault(before=_refuse_files, finished=_allow_files),
    "writer killed after the call": Fault(after=_kill_writer),
    "program killed in the save": Fault(while_saving=_kill_program),
    "program ends without a wait": Fault(ends_without_wait=True),
    "directory removed after the call": Fault(after=_remove),
    "503 for 20 requests": Fault(in_bucket=True),
    "byte flipped": Fault(finished=_flip),
    "file cut in half": Fault(finished=_truncate),
    "file lost": Fault(finished=_lose_file),
}
"""The first is none, to see that each library restores what it saved."""
