"""The evaluation of preservation policies, and the answers that a user's own may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.policy.contexts import CheckpointInfo, PreservationContext
from holdfast.policy.preservation_evaluation import kept, split
from holdfast.policy.preservation_policy import AnyPreservationPolicy, LatestN
from tests.policy.strategies import NOW, UserPreservationPolicy, at, checkpoint


@pytest.mark.parametrize(
    "answer",
    [
        None,
        True,
        [],
        [True],
        [True] * 3,
        [True, None],
        [1, 0],
        "ab",
        {True, False},
        {1: True, 2: True},
        (stays for stays in [True, True]),
        np.array([1, 0]),
        np.array(True),
        np.array([[True], [True]]),
    ],
    ids=lambda answer: repr(answer)[:30],
)
def test_users_answer_that_is_not_a_bool_for_each_is_refused_by_its_class(answer: Any) -> None:
    infos = [checkpoint(1), checkpoint(2)]
    mine = UserPreservationPolicy(lambda checkpoints: answer)
    for policy in (mine, AnyPreservationPolicy([LatestN(1), mine])):
        with pytest.raises(
            InvalidArgumentError, match=r"^UserPreservationPolicy\.should_preserve: expected its"
        ):
            kept(policy, infos, context=NOW)


@pytest.mark.parametrize(
    "answer",
    [[True, False], (True, False), np.array([True, False]), [np.True_, np.False_]],
    ids=repr,
)
def test_users_answer_may_be_any_sequence_of_bools(answer: Any) -> None:
    infos = [checkpoint(1), checkpoint(2)]
    policy = UserPreservationPolicy(lambda checkpoints: answer)
    assert kept(policy, infos, context=NOW) == (True, True)
    assert kept(policy, [*reversed(infos)], context=NOW) == (True, True)


def test_a_policy_sees_the_checkpoints_by_step_and_of_one_step_by_time() -> None:
    seen: list[CheckpointInfo] = []

    def first_of(infos: Any) -> list[bool]:
        seen.extend(infos)
        return [i == 0 for i in range(len(infos))]

    infos = [checkpoint(9, 5), checkpoint(4, 9), checkpoint(0, 7), checkpoint(9, 1)]
    answers = kept(UserPreservationPolicy(first_of), infos, context=NOW)
    assert seen == [infos[2], infos[1], infos[3], infos[0]]
    assert answers == (True, False, True, False)


def test_a_policy_gets_the_context_it_is_asked_in() -> None:
    class Recent:
        def should_preserve(self, checkpoints: Any, *, context: PreservationContext) -> Any:
            return [(context.now - info.time).total_seconds() < 5 for info in checkpoints]

    infos = [checkpoint(1, 0), checkpoint(2, 8), checkpoint(3, 9)]
    policy = AnyPreservationPolicy([Recent()])
    assert kept(policy, infos, context=PreservationContext(at(10))) == (False, True, True)


def test_a_policy_cannot_change_the_list_it_is_asked_about() -> None:
    infos = [checkpoint(1), checkpoint(2)]

    def clears(checkpoints: Any) -> list[bool]:
        count = len(checkpoints)
        if hasattr(checkpoints, "clear"):
            checkpoints.clear()
        return [False] * count

    policy = AnyPreservationPolicy([UserPreservationPolicy(clears), LatestN(2)])
    assert kept(policy, infos, context=NOW) == (True, True)
    assert len(infos) == 2


@pytest.mark.parametrize("policy", [None, 3, LatestN, object()])
def test_only_a_policy_can_be_asked_or_split(policy: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^kept: expected policy to be"):
        kept(policy, [], context=NOW)
    with pytest.raises(InvalidArgumentError, match=r": expected preservation_policy to be"):
        split(policy)
