"""The time that the threads of this process were ready and waited for a processor.

The kernel counts it for each thread (`/proc/self/task/*/schedstat`, in nanoseconds). It grows on a
machine with more work than processors, and where a limit of the cgroup stops the process. Where the
kernel does not count it, nothing is found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TASKS = Path("/proc/self/task")
NANOSECONDS = 1_000_000_000


def run_delays() -> dict[str, int]:
    """Return the nanoseconds that each thread has waited so far, by its id."""
    delays: dict[str, int] = {}
    try:
        threads = os.listdir(TASKS)
    except OSError:
        return delays
    for thread in threads:
        try:
            delays[thread] = int((TASKS / thread / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            # It has ended meanwhile, or the kernel does not count.
            continue
    return delays


def longest_delay_secs(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Return for how long the thread that waited most has done so between two counts."""
    delays = (count - before.get(thread, 0) for thread, count in after.items())
    return max(0, max(delays, default=0)) / NANOSECONDS
