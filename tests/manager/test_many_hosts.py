"""A job over several hosts: each with its own agent and RAM, one checkpoint for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import Host, events, wait_until
from tests.manager.job import check_went_on, run_job, seen, sources, start_job


def test_four_hosts_make_one_checkpoint_and_all_come_back(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = run_job(four_hosts, run, steps=9, interval=4)
    assert [r["saved"] for r in first] == [[0, 4, 8]] * 4
    assert first[0]["steps"] == [0, 4, 8]
    again = run_job(four_hosts, run, steps=4, interval=4)
    check_went_on(again, 8)
    assert set(sources(run)) <= {"ram", "peer"}


def test_fewer_hosts_go_on_from_what_more_hosts_saved(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_job(four_hosts, run, steps=5, interval=4, position=False)
    two = run_job(four_hosts[1:3], run, steps=5, interval=4, position=False)
    check_went_on(two, 4)
    four = run_job(four_hosts, run, steps=1, interval=100, position=False)
    check_went_on(four, 8)


def test_a_signal_on_one_host_saves_and_leaves_on_all_hosts_at_one_step(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    found = run_job(
        four_hosts, run, steps=2000, sleep=0.02, interval=10**6, signal_at=20, signal_rank=2
    )
    (left,) = {r["left"] for r in found}
    assert left >= 20
    assert found[0]["steps"] == [0, left]


def test_continuous_targets_are_met_by_all_hosts_at_one_step(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    found = run_job(four_hosts, run, steps=300, sleep=0.01)
    complete = seen(run, "committed")
    assert len(complete) >= 3
    assert complete <= set.intersection(*(set(r["saved"]) for r in found))
    assert complete == set(found[0]["steps"])


@pytest.mark.parametrize("killed", [0, 2])
def test_an_agent_that_is_killed_comes_back_and_all_hosts_save_on(
    four_hosts: list[Host], tmp_path: Path, killed: int
) -> None:
    run = tmp_path / "run"
    job = start_job(four_hosts, run, steps=1500, sleep=0.01)
    wait_until(lambda: len(events(run, "committed")) >= 2)
    four_hosts[killed].kill_agent()
    before = max(seen(run, "committed"))
    wait_until(lambda: max(seen(run, "committed")) > before + 50)
    found = job.results()
    assert len(events(run, "agent_started")) == 5
    # Of more than a hundred the newest hundred are kept.
    complete = seen(run, "committed")
    assert set(found[0]["steps"]) <= complete
    assert complete <= set.intersection(*(set(r["saved"]) for r in found))
