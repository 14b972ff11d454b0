"""Hosts that are lost with their RAM, at rest and in the middle of something.

Wanted: the run goes on from the last complete step, from RAM and peers where copies are left.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.hosts import Host, stop, wait_until
from tests.trainer.frameworks import FRAMEWORKS
from tests.trainer.job import (
    check_went_on,
    has_copies,
    is_committed,
    lose,
    parts_in_ram,
    run_job,
    seen,
    slots_locked,
    sources,
    spin_until,
    start_job,
    stopped_before_the_manifest,
    stopped_inside,
)

BIG = {"big_mib": 96, "big_every": 4, "device_count": 1}


@FRAMEWORKS
@pytest.mark.parametrize(
    "lost", [0, *(pytest.param(other, marks=pytest.mark.soak) for other in (1, 2, 3))]
)
def test_one_lost_host_costs_no_step_and_no_read_of_the_durable_tier(
    four_hosts: list[Host], tmp_path: Path, lost: int, framework: str
) -> None:
    run = tmp_path / "run"
    run_job(four_hosts, run, steps=9, interval=4, dies=True, framework=framework)
    wait_until(lambda: has_copies(four_hosts, 8))
    lose(four_hosts[lost])
    check_went_on(run_job(four_hosts, run, steps=1, interval=100, framework=framework), 8)
    assert set(sources(run)) <= {"ram", "peer"}


@pytest.mark.soak
@FRAMEWORKS
def test_two_lost_hosts_are_survived_by_what_is_durable(
    four_hosts: list[Host], tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    run_job(four_hosts, run, framework=framework, steps=9, interval=4, dies=True)
    lose(four_hosts[1], four_hosts[2])
    check_went_on(run_job(four_hosts, run, framework=framework, steps=1, interval=100), 8)
    assert "durable" in sources(run)


@pytest.mark.soak
@FRAMEWORKS
def test_two_lost_hosts_are_survived_in_ram_by_three_copies(
    four_hosts: list[Host], tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    run_job(four_hosts, run, framework=framework, steps=9, interval=4, copies=3, dies=True)
    wait_until(lambda: has_copies(four_hosts, 8, 3))
    lose(four_hosts[0], four_hosts[2])
    check_went_on(run_job(four_hosts, run, framework=framework, steps=1, interval=100, copies=3), 8)
    assert set(sources(run)) <= {"ram", "peer"}


@pytest.mark.soak
@pytest.mark.parametrize("lost", [1, 0])
def test_a_host_lost_in_the_middle_of_a_save_costs_that_save_alone(
    three_hosts: list[Host], tmp_path: Path, lost: int
) -> None:
    run = tmp_path / "run"
    job = start_job(
        three_hosts, run, device_count=1, steps=10**6, interval=4, sleep=0.02, hold=[lost, 8]
    )
    job.ranks[lost].await_line("held")
    others = {rank: one for rank, one in enumerate(three_hosts) if rank != lost}
    wait_until(lambda: all(rank in parts_in_ram(one, 8) for rank, one in others.items()))
    wait_until(lambda: has_copies(three_hosts, 4))
    assert lost not in parts_in_ram(three_hosts[lost], 8)
    lose(three_hosts[lost])
    job.kill()
    again = run_job(three_hosts, run, device_count=1, steps=1, interval=100)
    check_went_on(again, 4)
    assert again[0]["steps"] == [0, 4]
    assert set(sources(run)) <= {"ram", "peer"}


@pytest.mark.soak
@FRAMEWORKS
def test_a_host_lost_while_another_copies_its_part_costs_no_protected_step(
    three_hosts: list[Host], tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    a, b, _ = three_hosts
    job = start_job(
        three_hosts,
        run,
        framework=framework,
        **BIG,
        steps=10**6,
        interval=10**6,
        ram_interval=4,
        sleep=0.05,
    )
    wait_until(lambda: 4 in seen(run, "protected"))
    copier = b.agent().pid

    def is_copying(step: int) -> bool:
        # What the stopped agent had sent before may be all that was missing.
        time.sleep(0.5)
        return slots_locked(b, copier, "WRITE") and 0 not in parts_in_ram(b, step)

    step = stopped_inside(
        a.agent().pid,
        range(8, 100, 4),
        lambda step: 0 in parts_in_ram(a, step) and slots_locked(b, copier, "WRITE"),
        is_copying,
    )
    lose(a)
    job.kill()
    assert step not in seen(run, "protected")
    assert 0 not in parts_in_ram(b, step)
    # On a busy machine the copies of the one before it may not have come either.
    protected = max(seen(run, "protected"))
    found = run_job(three_hosts, run, framework=framework, **BIG, steps=1, interval=10**6)
    went_on_from = found[0]["start"] - 1
    assert protected <= went_on_from < step
    check_went_on(found, went_on_from)
    assert set(sources(run)) <= {"ram", "peer"}


@pytest.mark.soak
@FRAMEWORKS
def test_a_leading_host_lost_before_the_manifest_is_followed_by_one_that_commits(
    three_hosts: list[Host], tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    job = start_job(
        three_hosts, run, framework=framework, **BIG, steps=10**6, interval=4, sleep=0.05
    )
    wait_until(lambda: is_committed(run, 4))

    step = stopped_before_the_manifest(three_hosts, run)
    lose(three_hosts[0])
    job.kill()
    assert not is_committed(run, step)
    wait_until(lambda: is_committed(run, step))
    check_went_on(
        run_job(three_hosts, run, framework=framework, **BIG, steps=1, interval=10**6), step
    )


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [1, 0])
@FRAMEWORKS
def test_a_host_lost_while_others_read_from_it_ends_the_start_and_the_next_goes_on(
    three_hosts: list[Host], tmp_path: Path, lost: int, framework: str
) -> None:
    run = tmp_path / "run"
    run_job(three_hosts, run, framework=framework, **BIG, steps=5, interval=4, dies=True)
    wait_until(lambda: has_copies(three_hosts, 4))
    job = start_job(
        three_hosts, run, framework=framework, **BIG, steps=1, interval=10**6, heartbeat_secs=10
    )
    agent = three_hosts[lost].agent().pid
    spin_until(lambda: slots_locked(three_hosts[lost], agent, "READ"))
    stop(agent)
    lose(three_hosts[lost])
    # PyTorch has no heartbeat of its own; ours are missed for 100 s.
    codes = [rank.wait(160) for rank in job.ranks]
    assert all(codes), f"a rank has ended well without the others: {codes}"
    check_went_on(run_job(three_hosts, run, framework=framework, **BIG, steps=1, interval=10**6), 4)
    assert set(sources(run)) <= {"ram", "peer"}
