"""Watches a directory from another process and notes when each checkpoint is finished."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LOOK_SECS = 0.01


@dataclass
class Watcher:
    """`times`: when each checkpoint was first seen finished, by `time.time`, ascending."""

    times: list[float] = field(default_factory=list)


@contextlib.contextmanager
def watch(system: str, directory: Path) -> Iterator[Watcher]:
    """Watches while the block runs; what was finished before does not count."""
    command = [sys.executable, "-m", "benchmarks.watching", system, str(directory)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    process.stdout.readline()
    watcher = Watcher()
    try:
        yield watcher
    finally:
        out, _ = process.communicate("")
        watcher.times += json.loads(out)


def main() -> None:
    """Looks until standard input is closed, then prints the times."""
    from benchmarks.systems import committed

    system, directory = sys.argv[1], Path(sys.argv[2])
    known = committed(system, directory)
    print("ready", flush=True)
    times = []
    import select

    while not select.select([sys.stdin], [], [], LOOK_SECS)[0]:
        found = committed(system, directory)
        times += [time.time()] * bool(found - known)
        known |= found
    print(json.dumps(times))


if __name__ == "__main__":
    main()
