"""A rank that ends with its host, of which no agent and no framework reports anything."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from holdfast.errors import ProcessLostError
from holdfast.trainer.ranks.heartbeats import MISSED_MAX, Heartbeats
from tests.hosts import wait_until
from tests.trainer.ranks import MemoryWords

FOLDER = "holdfast/heartbeats-7"


@dataclass
class OfOneRank(MemoryWords):
    """The service as one rank sees it, whose connection may break."""

    is_broken: bool = False

    def put_if_absent(self, key: str, value: str) -> bool:
        if self.is_broken:
            raise ProcessLostError("the connection is broken")
        return super().put_if_absent(key, value)


def heartbeats(words: MemoryWords, rank: int) -> Heartbeats:
    return Heartbeats(words, FOLDER, rank, 3, beat_secs=0.05)


def test_a_rank_whose_heartbeats_end_is_named_and_one_that_never_began_is_not() -> None:
    own = OfOneRank()
    other = OfOneRank(own.words)
    with heartbeats(own, 0).running() as lost:
        with heartbeats(other, 1).running():
            wait_until(lambda: own.asked["delete"] >= 3)
            assert lost() is None
            other.is_broken = True
            wait_until(lambda: lost() is not None)
            with pytest.raises(ProcessLostError, match="rank 1 of 3 sent no heartbeat"):
                raise lost()
        other.is_broken = False


def test_a_rank_that_never_began_is_lost_if_nothing_is_heard_of_its_host_either() -> None:
    words, looks = OfOneRank(), list[set[int]]()
    is_heard_at_times = True

    def quiet_ranks() -> set[int]:
        # The host of rank 2 is heard just before the rank would be lost.
        is_heard = is_heard_at_times and len(looks) % MISSED_MAX == 0
        looks.append(set() if is_heard else {1, 2})
        return looks[-1]

    watching = heartbeats(words, 0)
    watching.quiet_ranks = quiet_ranks
    with watching.running() as lost, heartbeats(words, 1).running():
        wait_until(lambda: len(looks) > 3 * MISSED_MAX)
        assert lost() is None
        is_heard_at_times = False
        wait_until(lambda: lost() is not None)
        with pytest.raises(ProcessLostError, match="rank 2 of 3 sent no heartbeat"):
            raise lost()


def test_ranks_that_live_are_not_lost_and_leave_nothing_behind() -> None:
    words = MemoryWords()
    before = threading.active_count()
    with (
        heartbeats(words, 0).running() as lost,
        heartbeats(words, 1).running() as none,
        heartbeats(words, 2).running(),
    ):
        # Each of the two has sent for three times the time after which it would be lost.
        wait_until(lambda: words.asked["put_if_absent"] >= 2 * 3 * MISSED_MAX)
        assert lost() is None
        assert none() is None
    assert words.words == {}
    assert threading.active_count() == before
