"""What is on the timeline, as a table."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.format.timeline import on_timeline
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import RUN_ID, TIME

# name: (attempt -> origin, checkpoints there are, those on the timeline)
TABLE: dict[str, tuple[dict, str, str]] = {
    "nothing": ({}, "", ""),
    "checkpoints without any attempt": ({}, "10.1", ""),
    "one attempt": ({1: None}, "10.1 20.1", "10.1 20.1"),
    "order is of steps, not of names": ({1: None}, "100.1 20.1", "20.1 100.1"),
    "a restart goes on": ({1: None, 2: (20, 1)}, "10.1 20.1 30.2", "10.1 20.1 30.2"),
    "a restart that lost the last one": ({1: None, 2: (10, 1)}, "10.1 20.1", "10.1"),
    "a rewind": ({1: None, 2: (50, 1)}, "50.1 60.1 70.1 60.2", "50.1 60.2"),
    "a rewind before it saved": ({1: None, 2: (50, 1)}, "50.1 60.1 70.1", "50.1"),
    "a rewind of a rewind": (
        {1: None, 2: (50, 1), 3: (30, 1)},
        "30.1 40.1 50.1 60.2 40.3",
        "30.1 40.3",
    ),
    "a rewind within the branch": (
        {1: None, 2: (50, 1), 3: (60, 2)},
        "50.1 60.1 70.1 60.2 70.2 70.3",
        "50.1 60.2 70.3",
    ),
    "back to the first branch": (
        {1: None, 2: (50, 1), 3: (70, 1)},
        "50.1 60.1 70.1 60.2 80.3",
        "50.1 60.1 70.1 80.3",
    ),
    "overwritten by force": ({1: None, 2: (50, 1)}, "40.1 50.1 50.2", "40.1 50.2"),
    "overwriting, not committed yet": ({1: None, 2: (50, 1)}, "40.1 50.1", "40.1 50.1"),
    "overwritten twice": (
        {1: None, 2: (50, 1), 3: (50, 2)},
        "50.1 50.2 50.3 60.3",
        "50.3 60.3",
    ),
    "a new start from nothing": ({1: None, 2: None}, "10.1 20.1 10.2", "10.2"),
    "the origin's attempt has no record": ({3: (20, 2)}, "10.1 10.2 20.2 30.2", "10.2 20.2"),
    "an attempt between has no record": (
        {1: None, 3: (20, 2)},
        "10.1 15.2 20.2 30.3",
        "15.2 20.2 30.3",
    ),
    "the origin does not exist any more": ({1: None, 2: (50, 1)}, "40.1 60.2", "40.1 60.2"),
    "an attempt without a record has no steps": ({1: None}, "10.1 20.2", "10.1"),
    "an origin that is not older ends the chain": ({1: (5, 2), 2: (9, 2)}, "1.1 1.2", "1.2"),
    "step 0": ({1: None, 2: (0, 1)}, "0.1 1.1", "0.1"),
    "attempts are numbers": (
        {n: (n - 1, n - 1) if n > 1 else None for n in range(1, 12)},
        "1.1 9.9 10.10 12.11",
        "1.1 9.9 10.10 12.11",
    ),
}


def _ids(text: str) -> list[CheckpointId]:
    return [checkpoint_id(*map(int, word.split("."))) for word in text.split()]


def _attempts(origins: dict) -> dict[int, AttemptRecord]:
    return {
        number: AttemptRecord(
            run_id=RUN_ID,
            attempt=attempt_id(number),
            origin=checkpoint_id(*origin) if origin is not None else None,
            host="h",
            pid=1,
            time=TIME,
        )
        for number, origin in origins.items()
    }


@pytest.mark.parametrize(("origins", "there", "expected"), TABLE.values(), ids=TABLE)
def test_the_timeline_is(origins: dict, there: str, expected: str) -> None:
    attempts = _attempts(origins)
    assert on_timeline(_ids(there), attempts) == _ids(expected)
    assert on_timeline(reversed(_ids(there)), attempts) == _ids(expected)


def test_of_two_attempts_with_one_number_the_recorded_one_counts() -> None:
    """A run was put back to an earlier state, and trained on: its attempt 2 is another one."""
    attempts = _attempts({1: None, 2: (50, 1)})
    lost = CheckpointId(60, AttemptId(2, "ffffffff"))
    assert on_timeline([*_ids("50.1 60.2"), lost], attempts) == _ids("50.1 60.2")
    assert on_timeline([*_ids("50.1"), lost], attempts) == _ids("50.1")


def test_an_origin_in_an_attempt_that_was_lost_ends_the_chain() -> None:
    """The record of its number is another attempt's, whose origin does not count."""
    lost = AttemptId(2, "ffffffff")
    attempts = _attempts({1: None, 2: (50, 1)})
    attempts[3] = msgspec.structs.replace(_attempts({3: None})[3], origin=CheckpointId(70, lost))
    there = [*_ids("50.1 60.2 90.3"), CheckpointId(60, lost), CheckpointId(80, lost)]
    assert on_timeline(there, attempts) == [CheckpointId(60, lost), *_ids("90.3")]
