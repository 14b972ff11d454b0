"""Many short runs, one after the other: none leaves a process, memory, a descriptor or a thread."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import save_decision_policy
from tests.hosts import Host, wait_until
from tests.trust.figures import tell

RUN_COUNT = 100
WARM_COUNT = 5
"""After so many, the process has loaded and opened what it keeps."""


def train(run: Path) -> None:
    """Starts a run, saves three steps and closes it."""
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    with holdfast.CheckpointManager(run, save_decision_policy=every_step) as manager:
        for step in range(3):
            manager.save(step, {"w": np.full(100_000, step)}, force=True)


def held() -> Counter[str]:
    """The descriptors and threads of this process."""
    gc.collect()
    return Counter(fds=len(os.listdir("/proc/self/fd")), threads=threading.active_count())


def check_nothing_stays(host: Host) -> None:
    wait_until(lambda: not host.agent_processes(), secs=120)
    assert list(host.folder.iterdir()) == []


@pytest.mark.soak
def test_a_hundred_short_runs_leave_nothing(one_host: Host, tmp_path: Path) -> None:
    for number in range(WARM_COUNT):
        train(tmp_path / f"warm-{number}")
    before = held()
    most = 0
    for number in range(RUN_COUNT):
        train(tmp_path / f"run-{number}")
        most = max(most, len(one_host.agent_processes()))
    wait_until(lambda: held() <= before)
    check_nothing_stays(one_host)
    tell(
        "short runs",
        f"{RUN_COUNT} runs of 3 saves, one after the other, leave nothing",
        f"no process, memory, descriptor or thread left; at most {most} agents at once",
    )
