"""Hosts that are lost, and processes that are killed, at random moments, again and again.

Whatever was protected or durable when it happened is there afterwards, bit for bit, and every start
comes up within a bounded time.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, events, wait_until
from tests.trainer.job import Job, lose, start_job
from tests.trust.figures import tell

SEED = 20261123
LOSS_COUNT = 20
OPTIONS: dict[str, Any] = {"device_count": 1, "steps": 10**6, "sleep": 0.01, "linger": 60}


def newest_kept(run: Path) -> int:
    """The newest step of which this attempt, or the one before, said that it is kept."""
    return max((e["step"] for e in events(run, "protected", "committed")), default=-1)


def is_kept_anew(run: Path) -> bool:
    """Whether the present attempt has all copies of something, after what was lost before it."""
    started = events(run, "attempt_started")[-1]["time"]
    return any(e["time"] > started for e in events(run, "protected", "committed"))


def strike(chance: random.Random, job: Job) -> str:
    """Kills something, and with it the job; what that was."""
    what = chance.choice(["host", "host", "agent", "trainers"])
    victim = chance.randrange(len(job.hosts))
    if what == "host":
        lose(job.hosts[victim])
    elif what == "agent":
        job.hosts[victim].kill_agent()
        time.sleep(chance.uniform(0, 1))
    job.kill()
    return f"{what} {victim}"


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["continuous", "ram"])
def test_what_was_kept_survives_losses_at_random_moments(
    three_hosts: list[Host], tmp_path: Path, policy: str
) -> None:
    run = tmp_path / "run"
    chance = random.Random(f"{SEED} {policy}")
    rare = {"interval": 1000, "ram_interval": 10} if policy == "ram" else {}
    floor, struck = -1, "nothing"
    slowest_secs = 0.0
    for count in range(LOSS_COUNT):
        where = f"seed {SEED} {policy}, loss {count}, after the loss of {struck}"
        started = time.monotonic()
        job = start_job(three_hosts, run, **OPTIONS, **rare)
        found = job.await_lines("start")
        slowest_secs = max(slowest_secs, time.monotonic() - started)
        (start,) = {each["start"] for each in found}
        assert start > floor, f"{where}: step {floor} was kept, and it started at {start}"
        assert all(each["right"] for each in found), where
        wait_until(lambda: is_kept_anew(run))
        time.sleep(chance.uniform(0, 1.5))
        floor = newest_kept(run)
        struck = strike(chance, job)
    tell(
        f"lost at random {policy}",
        f"{LOSS_COUNT} losses, nothing kept is lost",
        f"all, the slowest start after {slowest_secs:.0f} s",
    )
