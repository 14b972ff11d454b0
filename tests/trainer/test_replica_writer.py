"""Copies that data parallelism has made: other hosts keep them of their own bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import Host, wait_until
from tests.trainer.job import check_went_on, has_copies, lose, run_job, sources

BIG_BYTES = 32 << 20


@pytest.mark.soak
def test_of_a_replicated_state_only_what_one_rank_has_alone_crosses_the_network(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo = {"interval": 4, "sharded": False, "big_mib": 32, "dies": True}
    saved = run_job(two_hosts, run, steps=9, sleep=0.1, **todo)
    assert [r["saved"] for r in saved] == [[0, 4, 8]] * 2
    wait_until(lambda: has_copies(two_hosts, 8))
    for one in two_hosts:
        status = one.agent()
        assert [held.parts_in_ram for held in status.held] == [2]
        # A number and a short array that rank 0 alone has, and what came before slots were ready.
        assert status.pulled_bytes < BIG_BYTES, "each of three pulled half of the large array"
    lose(two_hosts[0])
    check_went_on(run_job(two_hosts, run, steps=1, interval=100, sharded=False, big_mib=32), 8)
    assert set(sources(run)) <= {"ram", "peer"}


@pytest.mark.soak
def test_what_is_sharded_is_pulled_and_the_replicated_rest_of_the_part_is_not(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_job(two_hosts, run, steps=9, sleep=0.1, interval=1, big_mib=32, dies=True)
    wait_until(lambda: has_copies(two_hosts, 8))
    for one in two_hosts:
        # Half of a small array in each checkpoint; whole parts only before slots were ready.
        assert 9 * 1600 <= one.agent().pulled_bytes < 9 * BIG_BYTES / 4
    lose(two_hosts[1])
    check_went_on(run_job(two_hosts, run, steps=1, interval=100, big_mib=32), 8)
    assert set(sources(run)) <= {"ram", "peer"}


def test_with_one_copy_nothing_is_copied_for_others(two_hosts: list[Host], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_job(two_hosts, run, steps=9, interval=4, sharded=False, big_mib=32, copies=1, dies=True)
    for one in two_hosts:
        status = one.agent()
        assert status.pulled_bytes == 0
        assert [held.parts_in_ram for held in status.held] == [1]
