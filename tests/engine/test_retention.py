"""The checkpoints that the durable tier drops, as a table."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.engine.lifecycle.retention import Branches, branches, to_drop
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.policy.contexts import CheckpointInfo
from holdfast.policy.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    CustomSteps,
    EveryNSteps,
    LatestN,
)
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import RUN_ID, TIME


def _ids(text: str) -> list[CheckpointId]:
    return [checkpoint_id(*map(int, word.split("."))) for word in text.split()]


def _attempts(origins: list) -> dict[int, AttemptRecord]:
    return {
        number: AttemptRecord(
            run_id=RUN_ID,
            attempt=attempt_id(number),
            origin=None if origin is None else checkpoint_id(*origin),
            host="h",
            pid=1,
            time=TIME,
        )
        for number, origin in enumerate(origins, 1)
    }


def _info(checkpoint: CheckpointId) -> CheckpointInfo:
    """Each step is a second; the loss is best at step 20."""
    time = TIME + timedelta(seconds=checkpoint.step)
    return CheckpointInfo(checkpoint.step, time, {"loss": abs(checkpoint.step - 20)})


# name: (origins of the attempts, committed, policy, dropped)
TABLE: dict[str, tuple] = {
    "nothing": ([None], "", LatestN(1), ""),
    "all kept": ([None], "10.1 20.1", LatestN(2), ""),
    "the oldest goes": ([None], "10.1 20.1 30.1", LatestN(2), "10.1"),
    "the oldest first": ([None], "40.1 10.1 30.1 20.1", LatestN(1), "10.1 20.1 30.1"),
    "every n": ([None], "10.1 15.1 20.1 25.1 30.1", EveryNSteps(20), "10.1 15.1 25.1"),
    "the newest stays whatever is said": ([None], "10.1 15.1", EveryNSteps(10), ""),
    "by metric": ([None], "10.1 20.1 30.1", BestN(1, metric="loss"), "10.1"),
    "either policy keeps": (
        [None],
        "10.1 20.1 30.1 40.1",
        AnyPreservationPolicy([LatestN(1), CustomSteps([10])]),
        "20.1 30.1",
    ),
    "a restart is one timeline": ([None, (20, 1)], "10.1 20.1 30.2", LatestN(2), "10.1"),
    # After going back to 50, the steps 60 and 70 wait until the timeline has come as far.
    "abandoned steps stay at first": ([None, (50, 1)], "50.1 60.1 70.1", LatestN(2), ""),
    "the policy judges them alone": ([None, (50, 1)], "50.1 60.1 70.1", LatestN(1), "60.1"),
    "abandoned steps that were passed go": (
        [None, (50, 1)],
        "50.1 60.1 70.1 60.2",
        LatestN(2),
        "60.1",
    ),
    "all of them once all are passed": (
        [None, (50, 1)],
        "50.1 60.1 70.1 80.2",
        LatestN(9),
        "60.1 70.1",
    ),
    "an overwritten one goes once the new one is there": (
        [None, (50, 1)],
        "40.1 50.1 50.2",
        LatestN(9),
        "50.1",
    ),
    "until then it is the timeline's": ([None, (50, 1)], "40.1 50.1", LatestN(1), "40.1"),
    "of two abandoned ones of one step the newer is judged": (
        [None, (10, 1), (10, 1)],
        "10.1 30.1 30.2",
        LatestN(9),
        "30.1",
    ),
    "a branch that is newer than the timeline's newest stays": (
        [None, (20, 1), (30, 1)],
        "20.1 30.1 25.2",
        LatestN(9),
        "",
    ),
    "nothing goes while the timeline has nothing": ([None, None], "10.1 20.1", LatestN(1), ""),
}


@pytest.mark.parametrize(("origins", "there", "policy", "dropped"), TABLE.values(), ids=TABLE)
def test_what_goes_is(origins: list, there: str, policy, dropped: str) -> None:
    found = branches(_ids(there), _attempts(origins))
    assert to_drop(found, policy, _info, TIME) == _ids(dropped)


@pytest.mark.parametrize(("origins", "there", "policy", "dropped"), TABLE.values(), ids=TABLE)
def test_what_stayed_stays_when_asked_again(
    origins: list, there: str, policy, dropped: str
) -> None:
    left = [c for c in _ids(there) if c not in _ids(dropped)]
    assert to_drop(branches(left, _attempts(origins)), policy, _info, TIME) == []


@pytest.mark.parametrize(("origins", "there", "policy", "dropped"), TABLE.values(), ids=TABLE)
def test_the_timelines_newest_never_goes(origins: list, there: str, policy, dropped: str) -> None:
    found = branches(_ids(there), _attempts(origins))
    assert not {*found.timeline[-1:]} & {*to_drop(found, policy, _info, TIME)}


@pytest.mark.parametrize("token", ["0" * 8, "f" * 8])
def test_an_abandoned_attempt_with_the_number_of_the_newest_one_is_passed_whatever_its_token(
    token: str,
) -> None:
    """The run was put back to an earlier state, or the record of its newest attempt was removed."""
    lost = [CheckpointId(step, AttemptId(2, token)) for step in (20, 30, 40)]
    found = branches([*_ids("10.1 20.2 30.2"), *lost], _attempts([None, (10, 1)]))
    assert found.timeline == tuple(_ids("10.1 20.2 30.2"))
    assert to_drop(found, LatestN(9), _info, TIME) == lost[:2]


def test_branches_tell_the_timeline_from_the_rest() -> None:
    found = branches(_ids("70.1 50.1 60.1 60.2"), _attempts([None, (50, 1)]))
    assert found == Branches(timeline=tuple(_ids("50.1 60.2")), abandoned=tuple(_ids("60.1 70.1")))
