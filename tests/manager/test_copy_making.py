"""Copies that data parallelism has made: other hosts keep them of their own bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, events, host, wait_until
from tests.manager.test_many_hosts import lose, sources, start_job
from tests.manager.test_processes import results

BIG_BYTES = 32 << 20


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(host(f"host-{name}")) for name in "ab"]


def are_all_protected(run: Path, step: int) -> bool:
    return step in {e["step"] for e in events(run, "protected")}


def test_of_a_replicated_state_only_what_one_rank_has_alone_crosses_the_network(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo = {"interval": 4, "sharded": False, "big_mib": 32}
    saved = results(start_job(two_hosts, run, steps=9, sleep=0.1, **todo))
    assert [r["saved"] for r in saved] == [[0, 4, 8]] * 2
    wait_until(lambda: are_all_protected(run, 8))
    for one in two_hosts:
        status = one.agent()
        assert [held.parts_in_ram for held in status.held] == [2]
        # A number and a short array that rank 0 alone has, and what came before slots were ready.
        assert status.pulled_bytes < BIG_BYTES, "each of three pulled half of the large array"
    lose(two_hosts[0])
    again = results(start_job(two_hosts, run, steps=1, interval=100, sharded=False, big_mib=32))
    assert [(r["start"], r["right"]) for r in again] == [(9, True)] * 2
    assert sources(run) <= {"ram", "peer"}


def test_what_is_sharded_is_pulled_and_the_replicated_rest_of_the_part_is_not(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(start_job(two_hosts, run, steps=9, sleep=0.1, interval=1, big_mib=32))
    wait_until(lambda: are_all_protected(run, 8))
    for one in two_hosts:
        # Half of a small array in each checkpoint; whole parts only before slots were ready.
        assert 9 * 1600 <= one.agent().pulled_bytes < 9 * BIG_BYTES / 4
    lose(two_hosts[1])
    again = results(start_job(two_hosts, run, steps=1, interval=100, big_mib=32))
    assert [(r["start"], r["right"]) for r in again] == [(9, True)] * 2
    assert sources(run) <= {"ram", "peer"}


def test_with_one_copy_nothing_is_copied_for_others(two_hosts: list[Host], tmp_path: Path) -> None:
    run = tmp_path / "run"
    results(start_job(two_hosts, run, steps=9, interval=4, sharded=False, big_mib=32, copies=1))
    for one in two_hosts:
        status = one.agent()
        assert status.pulled_bytes == 0
        assert [held.parts_in_ram for held in status.held] == [1]
