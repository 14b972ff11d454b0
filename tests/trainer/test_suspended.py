"""A job whose processes are all suspended for longer than its lease, or those of one host."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, events, stop
from tests.trainer.job import Job, check_went_on, run_job, seen, start_job
from tests.trust.figures import tell

SUSPENDED_SECS = 45.0
"""Longer than a lease lives, and than other hosts count on the RAM of a silent one."""
LONG_SECS = 110.0
"""Longer than ranks wait for a host without a heartbeat; a step of the job may take 120 s."""
RECOVERY_SECS = 240.0
OPTIONS: dict[str, Any] = {
    "device_count": 1,
    "lockstep": True,
    "sleep": 0.1,
    "goes_on": True,
    # JAX itself ends the processes of a job after 100 s.
    "heartbeat_secs": 600,
}


def processes(job: Job, rank: int) -> list[int]:
    """The trainer on a host, and its agent."""
    return [job.ranks[rank].process.pid, job.hosts[rank].agent().pid]


@contextlib.contextmanager
def suspended(pids: list[int], resumed: list[list[int]], pause_secs: float) -> Iterator[None]:
    """Suspend processes; continue them on leaving, group by group with a pause between."""
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for number, group in enumerate(resumed):
            time.sleep(pause_secs if number else 0)
            for pid in group:
                os.kill(pid, signal.SIGCONT)


def check_one_attempt(job: Job) -> None:
    assert len(events(job.run, "attempt_started")) == 1
    assert not events(job.run, "fenced", "superseded")


def check_all_kept(job: Job, before: int) -> int:
    """Check that the job ends well, and that the next start goes on from its last step."""
    results = job.results()
    check_one_attempt(job)
    last = min(result["steps"][-1] for result in results)
    assert last > before
    failed = {step for rank in job.ranks for line in rank.said("failed") for step in line["failed"]}
    accepted = set(results[0]["saved"])
    assert accepted - failed <= seen(job.run, "sealed") | seen(job.run, "dropped")
    (first, *_) = {result["start"] for result in results}
    assert first == 0
    return len(failed)


ORDERS = {
    "agents first": lambda a, b: [[a[1], b[1]], [a[0], b[0]]],
    "trainers first": lambda a, b: [[a[0], b[0]], [a[1], b[1]]],
    "the leader's host first": lambda a, b: [a, b],
    "the other host first": lambda a, b: [b, a],
}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("order", "secs"), [*((order, SUSPENDED_SECS) for order in ORDERS), ("agents first", LONG_SECS)]
)
def test_a_job_that_is_suspended_for_longer_than_its_lease_goes_on(
    two_hosts: list[Host], tmp_path: Path, order: str, secs: float
) -> None:
    run = tmp_path / "run"
    job = start_job(two_hosts, run, **OPTIONS, steps=150, interval=5)
    job.wait_until(lambda: any(step > 10 for step in seen(run, "committed")))
    groups = [processes(job, rank) for rank in (0, 1)]
    before = max(seen(run, "committed"))
    with suspended([*groups[0], *groups[1]], ORDERS[order](*groups), 4.0):
        time.sleep(secs)
    job.wait_until(lambda: max(seen(run, "committed")) > before + 10, RECOVERY_SECS)
    failed_count = check_all_kept(job, before)
    results = run_job(two_hosts, run, device_count=1, interval=5, steps=3)
    check_went_on(results, results[0]["start"] - 1)
    assert results[0]["start"] > max(seen(run, "committed") & set(range(149))) - 10
    tell(
        f"two hosts suspended for {secs:g} s, {order}",
        "one attempt, nothing lost",
        f"one attempt; {failed_count} saves reported as dropped",
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rank", "secs", "framework"),
    [
        (0, SUSPENDED_SECS, "jax"),
        (1, SUSPENDED_SECS, "jax"),
        # JAX ends a process whose coordinator has not answered for so long.
        (0, LONG_SECS, "torch"),
        (1, LONG_SECS, "torch"),
    ],
)
def test_a_job_with_a_suspended_host_goes_on_with_it(
    two_hosts: list[Host], tmp_path: Path, rank: int, secs: float, framework: str
) -> None:
    if framework == "torch":
        pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)
    run = tmp_path / "run"
    job = start_job(two_hosts, run, **OPTIONS, framework=framework, steps=150, interval=5)
    job.wait_until(lambda: any(step > 10 for step in seen(run, "committed")))
    group = processes(job, rank)
    before = max(seen(run, "committed"))
    with suspended(group, [group], 0.0):
        time.sleep(secs)
    job.wait_until(lambda: max(seen(run, "committed")) > before + 10, RECOVERY_SECS)
    failed_count = check_all_kept(job, before)
    tell(
        f"host {rank} of two suspended for {secs:g} s",
        "one attempt, nothing lost",
        f"one attempt; {failed_count} saves reported as dropped",
    )
