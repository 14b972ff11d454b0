"""What is on the timeline, as a table."""

from __future__ import annotations

import pytest

from holdfast.format.names import CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.format.timeline import on_timeline
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
    return [CheckpointId(*map(int, word.split("."))) for word in text.split()]


def _attempts(origins: dict) -> dict[int, AttemptRecord]:
    return {
        number: AttemptRecord(
            run_id=RUN_ID, attempt=number, origin=origin, host="h", pid=1, time=TIME
        )
        for number, origin in origins.items()
    }


@pytest.mark.parametrize(("origins", "there", "expected"), TABLE.values(), ids=TABLE)
def test_the_timeline_is(origins: dict, there: str, expected: str) -> None:
    attempts = _attempts(origins)
    assert on_timeline(_ids(there), attempts) == _ids(expected)
    assert on_timeline(reversed(_ids(there)), attempts) == _ids(expected)
