"""When to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidArgumentError
from holdfast.policy.contexts import CheckpointInfo, SaveContext
from holdfast.policy.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    FixedIntervalPolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
from holdfast.policy.save_evaluation import due, split
from tests.policy.strategies import (
    UserSavePolicy,
    any_save,
    by_agent,
    by_step,
    checkpoint,
    histories,
    save_context,
    save_contexts,
    secs,
    steps,
    user_save_policies,
)

every_policy = any_save(by_step | by_agent | user_save_policies)


def saved_steps(policy: SaveDecisionPolicy, context: SaveContext | None = None) -> list[int]:
    return [s for s in range(10) if policy.should_save(s, [], context=context or save_context())]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (FixedIntervalPolicy(1), list(range(10))),
        (FixedIntervalPolicy(4), [0, 4, 8]),
        (FixedIntervalPolicy(100), [0]),
        (SpecificStepsPolicy([7, 2, 2]), [2, 7]),
        (SpecificStepsPolicy([100]), []),
        (PreemptionCheckpointingPolicy(), []),
        (ContinuousCheckpointingPolicy(), list(range(10))),
        (AnySavePolicy([FixedIntervalPolicy(4), SpecificStepsPolicy([5])]), [0, 4, 5, 8]),
    ],
    ids=str,
)
def test_policy_saves_these_of_ten_steps(policy: SaveDecisionPolicy, expected: list[int]) -> None:
    assert saved_steps(policy) == expected


def test_preemption_is_saved_even_while_a_save_is_in_progress() -> None:
    policy = PreemptionCheckpointingPolicy()
    assert due(policy, 3, [], context=save_context(saving=True, preempted=True))
    assert not due(policy, 3, [], context=save_context(saving=True))


@given(interval=st.none() | secs, history=histories, now=st.integers(-20, 20))
def test_continuous_never_saves_while_a_save_is_in_progress(
    interval: float | None, history: list[CheckpointInfo], now: int
) -> None:
    policy = ContinuousCheckpointingPolicy(interval)
    assert not due(policy, 40, history, context=save_context(now, saving=True))


@pytest.mark.parametrize(
    ("interval", "last_secs", "now_secs", "expected"),
    [
        (None, 100, 100, True),
        (30, 100, 129.999999, False),
        (30, 100, 130, True),
        (0.1, 100, 100.1, True),
        (0.1, 100, 100.099999, False),
        (30, 100, 99, False),  # two hosts' clocks differ by a second
        (30, 100, 70, False),
        (30, 100, 69, True),  # the clock was set back
        (1e300, 100, 1e9, False),
    ],
)
def test_continuous_waits_for_its_interval(
    interval: float | None, last_secs: float, now_secs: float, expected: bool
) -> None:
    policy = ContinuousCheckpointingPolicy(interval)
    history = [checkpoint(1, 0), checkpoint(2, last_secs)]
    assert due(policy, 3, history, context=save_context(now_secs)) is expected


def test_continuous_saves_first_without_waiting() -> None:
    assert due(ContinuousCheckpointingPolicy(1e9), 0, [], context=save_context())


def test_continuous_counts_from_the_highest_step_in_whatever_order() -> None:
    policy = ContinuousCheckpointingPolicy(30)
    history = [checkpoint(9, 100), checkpoint(4, 0)]
    assert not due(policy, 10, history, context=save_context(110))


@pytest.mark.parametrize(
    ("interval", "budget", "cost", "elapsed", "expected"),
    [
        (None, 0.1, 0.5, 4.9, False),
        (None, 0.1, 0.5, 5.0, True),
        (None, 0.01, 0.5, 49.0, False),
        (None, 0.01, 0.5, 50.0, True),
        (60, 0.1, 0.5, 5.0, False),
        (60, 0.1, 0.5, 60.0, True),
        (1, 0.1, 0.5, 1.0, False),
        (None, 1, 0.0, 0.0, True),
        (None, 0.1, None, 1e6, False),  # what it costs is being found out
        (1, None, None, 1.0, True),
    ],
)
def test_continuous_stays_within_its_budget(
    interval: float | None, budget: float | None, cost: float | None, elapsed: float, expected: bool
) -> None:
    policy = ContinuousCheckpointingPolicy(interval, budget)
    context = save_context(100 + elapsed, cost_secs=cost)
    assert due(policy, 3, [checkpoint(2, 100)], context=context) is expected
    assert due(policy, 3, [], context=context)


@pytest.mark.parametrize("budget", [0, -0.1, 1.1, float("nan"), True, "3", np.True_, 10**400])
def test_a_budget_that_is_no_share_is_refused(budget: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_overhead to be a share above 0 and up to"):
        ContinuousCheckpointingPolicy(max_overhead=budget)


@given(
    members=st.lists(every_policy, min_size=1, max_size=4),
    step=steps,
    history=histories,
    context=save_contexts,
)
def test_any_saves_exactly_when_a_member_does(
    members: list[SaveDecisionPolicy],
    step: int,
    history: list[CheckpointInfo],
    context: SaveContext,
) -> None:
    whole = due(AnySavePolicy(members), step, history, context=context)
    assert whole is any(m.should_save(step, history, context=context) for m in members)


@given(policy=every_policy, step=steps, history=histories, context=save_contexts)
def test_the_shares_of_a_split_are_together_the_whole(
    policy: SaveDecisionPolicy, step: int, history: list[CheckpointInfo], context: SaveContext
) -> None:
    shares = [share for share in split(policy) if share is not None]
    answers = [due(share, step, history, context=context) for share in shares]
    assert any(answers) is due(policy, step, history, context=context)


def leaves(policy: Any) -> list[Any]:
    """The members of an "any", else the policy itself, else nothing."""
    return [] if policy is None else list(getattr(policy, "policies", [policy]))


@given(policy=every_policy)
def test_every_member_is_in_the_share_of_its_kind_once(policy: SaveDecisionPolicy) -> None:
    shares = split(policy)
    step_kinds = FixedIntervalPolicy | SpecificStepsPolicy
    agent_kinds = ContinuousCheckpointingPolicy | PreemptionCheckpointingPolicy
    assert all(isinstance(leaf, step_kinds) for leaf in leaves(shares.by_step))
    assert all(isinstance(leaf, agent_kinds) for leaf in leaves(shares.by_agent))
    assert all(isinstance(leaf, UserSavePolicy) for leaf in leaves(shares.by_user))
    in_shares = [id(leaf) for share in shares for leaf in leaves(share)]
    assert sorted(in_shares) == sorted(id(leaf) for leaf in leaves(policy))


@given(policy=any_save(by_step), step=steps, history=histories, context=save_contexts)
def test_the_share_of_every_rank_looks_at_the_step_alone(
    policy: SaveDecisionPolicy, step: int, history: list[CheckpointInfo], context: SaveContext
) -> None:
    assert split(policy)[1:] == (None, None)
    expected = due(policy, step, [], context=save_context())
    assert due(policy, step, history, context=context) is expected


def test_any_within_any_is_one_any() -> None:
    a, b, c = FixedIntervalPolicy(2), UserSavePolicy(True), PreemptionCheckpointingPolicy()
    assert AnySavePolicy([AnySavePolicy([a, AnySavePolicy([b])]), c]).policies == (a, b, c)


def test_subclass_of_a_built_in_policy_is_a_users_own() -> None:
    class Never(FixedIntervalPolicy, frozen=True):  # type: ignore[misc]
        def should_save(
            self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
        ) -> bool:
            return False

    never = Never(1)
    assert split(never) == (None, None, never)
    assert saved_steps(AnySavePolicy([never])) == []


@pytest.mark.parametrize("answer", [None, 1, "yes", [], np.array([True]), np.float64(1)], ids=repr)
def test_users_answer_that_is_no_bool_is_refused_by_its_class(answer: Any) -> None:
    for policy in (UserSavePolicy(answer), AnySavePolicy([UserSavePolicy(answer)])):
        with pytest.raises(InvalidArgumentError, match=r"^UserSavePolicy\.should_save: expected"):
            due(policy, 1, [], context=save_context())


@pytest.mark.parametrize("answer", [np.True_, np.array(True)], ids=repr)
def test_users_answer_may_be_numpys_bool(answer: Any) -> None:
    assert due(UserSavePolicy(answer), 1, [], context=save_context()) is True
    assert due(UserSavePolicy(~answer), 1, [], context=save_context()) is False


def test_users_error_arrives_unchanged() -> None:
    class Broken:
        def should_save(self, *args: Any, **more: Any) -> bool:
            raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        due(AnySavePolicy([Broken()]), 1, [], context=save_context())


@pytest.mark.parametrize("policy", [None, 3, FixedIntervalPolicy, object()])
def test_only_a_policy_can_be_asked_or_split(policy: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^due: expected policy to be"):
        due(policy, 1, [], context=save_context())
    with pytest.raises(InvalidArgumentError, match=r": expected save_decision_policy to be"):
        split(policy)
