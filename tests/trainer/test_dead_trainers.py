"""Trainers that die, and agents with them: what was saved becomes durable, or is cleared."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.hosts import Host, stop, wait_until
from tests.manifests import folders
from tests.trainer.job import (
    check_went_on,
    comes_true,
    durable_parts,
    is_committed,
    lose,
    parts_in_ram,
    run_job,
    seen,
    spin_until,
    start_job,
    stopped_before_the_manifest,
    stopped_inside,
)

BIG = {"big_mib": 64, "big_every": 4, "device_count": 1, "sleep": 0.05}


@pytest.mark.soak
def test_what_all_trainers_saved_before_they_died_is_committed_by_the_agents(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start_job(three_hosts, run, **BIG, steps=10, interval=4, stand_at=4)
    wait_until(lambda: is_committed(run, 0))
    last = three_hosts[2].agent().pid
    spin_until(lambda: 2 in parts_in_ram(three_hosts[2], 4))
    stop(last)
    spin_until(lambda: all(r in parts_in_ram(one, 4) for r, one in enumerate(three_hosts)))
    job.kill()
    assert 2 not in durable_parts(run, 4)
    os.kill(last, signal.SIGCONT)
    wait_until(lambda: is_committed(run, 4))
    check_went_on(run_job(three_hosts, run, **BIG, steps=1, interval=10**6), 4)


@pytest.mark.soak
def test_where_the_leaders_agent_dies_with_the_trainers_another_commits(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo = {"device_count": 1, "interval": 10**6, "ram_interval": 4}
    job = start_job(three_hosts, run, steps=10, stand_at=8, **todo)
    wait_until(lambda: 8 in seen(run, "protected"))
    leading = three_hosts[0].agent().pid
    stop(leading)
    job.kill()
    os.kill(leading, signal.SIGKILL)
    assert not is_committed(run, 8)
    wait_until(lambda: is_committed(run, 8))
    check_went_on(run_job(three_hosts, run, steps=1, **todo), 8)


@pytest.mark.soak
def test_a_checkpoint_whose_parts_are_all_durable_is_finished_by_the_next_opening(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start_job(two_hosts, run, **BIG, steps=10**6, interval=4)
    wait_until(lambda: is_committed(run, 4))
    step = stopped_before_the_manifest(two_hosts, run)
    lose(*two_hosts)
    job.kill()
    assert not is_committed(run, step)
    check_went_on(run_job(two_hosts, run, **BIG, steps=1, interval=10**6), step)
    wait_until(lambda: is_committed(run, step))


@pytest.mark.soak
def test_a_checkpoint_that_never_can_be_whole_is_cleared_by_the_next_opening(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start_job(two_hosts, run, **BIG, steps=10**6, interval=4)
    wait_until(lambda: is_committed(run, 4))

    def lacks_a_part(step: int) -> bool:
        if 1 in durable_parts(run, step):
            return False
        return comes_true(lambda: 0 in durable_parts(run, step), 4.0)

    step = stopped_inside(
        two_hosts[1].agent().pid,
        range(8, 200, 4),
        lambda step: f"{step:09d}.1" in folders(run) and not is_committed(run, step),
        lacks_a_part,
    )
    lose(*two_hosts)
    job.kill()
    check_went_on(run_job(two_hosts, run, **BIG, steps=1, interval=10**6), step - 4)
    wait_until(lambda: f"{step:09d}.1" not in folders(run))
