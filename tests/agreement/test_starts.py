"""Two starts of one run at once: the attempt's record decides, and one of them goes on."""

from __future__ import annotations

import pytest

from tests.agreement.cases import make, until


def test_of_two_starts_at_once_one_wins_and_the_other_is_told_that_the_run_is_busy() -> None:
    world = make(4)
    first = world.start_job(["h0000", "h0001"])
    second = world.start_job(["h0002", "h0003"])
    until(world, lambda: first.is_running or second.is_running)
    until(world, lambda: bool(first.refused or second.refused))
    assert first.is_running != second.is_running
    assert world.oracle.counts["busy"] == 2
    assert list(world.storage.attempts) == [1]


@pytest.mark.parametrize("answer_secs", [0.0, 0.5])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_of_two_starts_on_the_same_hosts_one_wins_in_whatever_order_their_ranks_come(
    seed: int, turned: bool, answer_secs: float
) -> None:
    world = make(3)
    world.answer_secs = answer_secs
    world.rng.seed(seed)
    hosts = list(world.hosts)
    first = world.start_job(hosts)
    second = world.start_job(hosts[::-1] if turned else hosts)
    until(world, lambda: first.is_running or second.is_running)
    until(world, lambda: bool(first.refused or second.refused))
    world.run(world.now + 20)
    (winner,) = (job for job in (first, second) if len(job.living) == len(hosts))
    assert winner.is_running
    assert not winner.refused
    assert list(world.storage.attempts) == [1]
