"""Sixteen ranks of one host within 1,024 descriptors, and a restart after one was killed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, events, host
from tests.ports import free_address
from tests.said import Said
from tests.trainer.job import Job, seen
from tests.trainer.test_processes import PROCESS
from tests.trust.figures import tell

RANK_COUNT = 16
DESCRIPTORS_MAX = 1024
START_SECS = 240.0
"""Sixteen processes that import JAX on two cores take a minute."""


@pytest.fixture
def limited_host() -> Iterator[Host]:
    with host() as made:
        made.prefix = ("prlimit", f"--nofile={DESCRIPTORS_MAX}:{DESCRIPTORS_MAX}")
        yield made


def start_ranks(one: Host, run: Path, **todo: Any) -> Job:
    address, flags = free_address(), "--xla_force_host_platform_device_count=1"
    text = json.dumps(todo)
    ranks = [
        Said(one.start(PROCESS, address, RANK_COUNT, rank, run, text, XLA_FLAGS=flags))
        for rank in range(RANK_COUNT)
    ]
    return Job([one], run, ranks)


def descriptor_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_sixteen_ranks_save_within_1024_descriptors_and_all_go_on_after_one_was_killed(
    limited_host: Host, tmp_path: Path, seed: int
) -> None:
    run, chance = tmp_path / "run", random.Random(seed)
    todo: dict[str, Any] = {"interval": 1, "sleep": 0.1, "lockstep": True, "goes_on": True}
    job = start_ranks(limited_host, run, **todo, steps=10**6)
    job.await_lines("start", secs=START_SECS)
    most = 0

    def has_saved(count: int) -> bool:
        nonlocal most
        most = max(most, descriptor_count(agent))
        return len(seen(run, "committed")) >= count

    agent = limited_host.agent().pid
    limits = Path(f"/proc/{agent}/limits").read_text().splitlines()
    (files,) = [line.split() for line in limits if line.startswith("Max open files")]
    assert files[3:5] == [str(DESCRIPTORS_MAX)] * 2
    job.wait_until(lambda: has_saved(60), START_SECS)
    killed = chance.randrange(RANK_COUNT)
    os.kill(job.ranks[killed].process.pid, signal.SIGKILL)
    sealed = max(seen(run, "sealed"))
    # The others end by way of JAX, or are ended as a launcher would.
    job.kill()
    # Storage may be behind so many ranks: steps are skipped then, and nothing runs out.
    assert not events(run, "failed", "events_lost"), job.told()
    assert not [text for rank in job.ranks for text in rank.errors if "open files" in text]
    skipped = {e["step"] for e in events(run, "dropped") if e["step"] < sealed}
    again = start_ranks(limited_host, run, **todo, steps=3)
    lines = again.await_lines("start", secs=START_SECS)
    (start,) = {line["start"] for line in lines}
    assert all(line["right"] for line in lines)
    assert start - 1 >= sealed
    again.results(START_SECS)
    (status,) = limited_host.agents()
    assert not events(run, "ram_unavailable")
    tell(
        f"16 ranks, seed {seed}",
        "no save fails within 1,024 descriptors; all go on after one was killed",
        f"{len(seen(run, 'committed'))} steps committed, 0 failed, {len(skipped)} skipped while "
        f"storage was behind; the agent had {most} descriptors at most; rank {killed} was killed "
        f"when {sealed} was sealed, all went on from {start - 1}; "
        f"{descriptor_count(status.pid)} descriptors after the end",
    )
