"""Watches a directory from another process and notes when each checkpoint is finished."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LOOK_SECS = 0.1
"""Looking costs the training what is being measured. When each was finished, its name tells."""


@dataclass
class Watcher:
    """`times`: when each checkpoint was finished, by `time.time`, ascending."""

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
    before = committed(system, directory)
    print("ready", flush=True)
    times: dict[int, float] = {}
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], LOOK_SECS)[0])
        times = committed(system, directory) | times
    print(json.dumps(sorted(at for step, at in times.items() if step not in before)))


if __name__ == "__main__":
    main()
