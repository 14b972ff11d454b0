"""One listing serves the steps of an opening, and none that could be misled by it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from holdfast.engine.lifecycle.catalog import Listing
from holdfast.engine.lifecycle.newest import NewestListing
from holdfast.format.names import STEP_MAX
from holdfast.format.records import AttemptRecord
from holdfast.host.tiers.opening_listing import (
    LEADER_SECS,
    OPENING_SECS,
    OpeningListing,
    listing_in,
    listing_message,
)
from tests.attempts import attempt_id, checkpoint_id
from tests.trust.in_process import StepClock

NEWEST = checkpoint_id(20)


def record(attempt: int, origin: tuple[int, int] | None = None) -> AttemptRecord:
    time = datetime(2026, 8, 1, tzinfo=UTC)
    return AttemptRecord(
        run_id="r",
        attempt=attempt_id(attempt),
        origin=None if origin is None else checkpoint_id(*origin),
        host="h",
        pid=1,
        time=time,
    )


def listing() -> NewestListing:
    sizes = {"part-00000-of-00001.json": 5, "image-00000-of-00001.safetensors": 7}
    return NewestListing(
        numbers=(1,),
        attempts={1: record(1)},
        checkpoints={checkpoint_id(10): Listing({}, True), NEWEST: Listing(sizes, True)},
        since_step=20,
    )


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


@pytest.fixture
def opening(clock: StepClock) -> OpeningListing:
    return OpeningListing(clock)


def test_a_listing_serves_each_step_once_and_readers_as_often_as_they_ask(
    opening: OpeningListing,
) -> None:
    opening.keep(listing(), opening.changes, is_for_start=True)
    assert opening.take_for_start() == listing()
    assert opening.take_for_start() is None
    opening.begun(record(2, (20, 1)))
    found = opening.take_for_leader(attempt_id(2), STEP_MAX)
    assert found is not None
    assert (found.numbers, set(found.attempts)) == ((1, 2), {1, 2})
    assert opening.take_for_leader(attempt_id(2), STEP_MAX) is None
    assert opening.of_attempt(attempt_id(2)) == opening.of_attempt(attempt_id(2)) == found
    assert opening.of_attempt(attempt_id(1)) is None


def test_nothing_is_shared_after_a_change(opening: OpeningListing) -> None:
    changes = opening.changes
    opening.keep(listing(), changes, is_for_start=True)
    opening.on_joined(attempt_id(1))
    opening.forget_listing()
    assert opening.take_for_start() is None
    assert opening.of_attempt(attempt_id(1)) is None
    assert not opening.is_open_for(attempt_id(1))
    # Begun before the change: it may lack it.
    opening.keep(listing(), changes)
    assert opening.of_attempt(attempt_id(1)) is None


def test_a_start_and_a_leader_use_no_old_listing(opening: OpeningListing, clock: StepClock) -> None:
    opening.keep(listing(), opening.changes, is_for_start=True)
    clock.secs += OPENING_SECS + 1
    assert opening.take_for_start() is None
    # Listed by a start that then waits for a lease.
    opening.keep(listing(), opening.changes)
    clock.secs += LEADER_SECS + 1
    opening.begun(record(2, (20, 1)))
    assert opening.take_for_leader(attempt_id(2), STEP_MAX) is None
    assert opening.of_attempt(attempt_id(2)) is not None


def test_a_leader_that_needs_earlier_parts_gets_none(opening: OpeningListing) -> None:
    opening.keep(listing(), opening.changes)
    opening.begun(record(2, (20, 1)))
    assert opening.take_for_leader(attempt_id(2), 19) is None


@pytest.mark.parametrize("begun", [record(2, (10, 1)), record(2), record(3, (20, 1))])
def test_an_attempt_that_goes_back_or_is_not_the_next_ends_it(
    opening: OpeningListing, begun: AttemptRecord
) -> None:
    opening.keep(listing(), opening.changes)
    opening.begun(begun)
    assert opening.of_attempt(begun.attempt) is None


def test_a_listing_is_the_same_after_its_way_to_a_trainer() -> None:
    assert listing_in(listing_message(listing())) == listing()
