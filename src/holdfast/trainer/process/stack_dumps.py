"""Have the stacks of all threads of this process written when `holdfast run` asks for them.

`faulthandler` writes them from its own handler in C, also while a call holds the interpreter lock.
Processes that this one forks inherit the handler, and append to the same file. The signal ends a
process that has no handler of it; the supervisor looks into the process's mask of caught signals
before it sends it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import IO

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""A real-time signal: the usual ones belong to programs, launchers and schedulers."""

_files: list[IO[bytes]] = []
"""The open files, which the handler writes to until the process ends."""


def write_stacks_on_demand(folder: Path) -> None:
    """Install the handler, which appends to this process's file in `folder`."""
    file = stacks_file(folder, os.getpid()).open("ab")
    _files.append(file)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True, chain=False)


def stacks_file(folder: Path, pid: int) -> Path:
    """Return the file of a process in the supervisor's folder."""
    return folder / f"{pid}.stacks"
