"""What to keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.contexts import CheckpointInfo
from holdfast.policy.preservation_evaluation import kept, split
from holdfast.policy.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    PreservationPolicy,
)
from tests.policy.strategies import (
    NOW,
    any_keeper,
    built_in_keepers,
    checkpoint,
    counts,
    histories,
    keeps_nothing,
    secs,
    user_keepers,
)

NAN, INF = float("nan"), float("inf")

every_policy = any_keeper(built_in_keepers | user_keepers)


def kept_steps(policy: PreservationPolicy, infos: list[CheckpointInfo]) -> list[int]:
    answers = kept(policy, infos, context=NOW)
    return [info.step for info, stays in zip(infos, answers, strict=True) if stays]


EVERY_SECOND = [checkpoint(step, secs=step) for step in range(1, 9)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LatestN(1), [8]),
        (LatestN(3), [6, 7, 8]),
        (LatestN(100), [1, 2, 3, 4, 5, 6, 7, 8]),
        (EveryNSeconds(3), [1, 4, 7, 8]),
        (EveryNSeconds(0.5), [1, 2, 3, 4, 5, 6, 7, 8]),
        (EveryNSeconds(1e300), [1, 8]),
        (EveryNSteps(3), [3, 6, 8]),
        (CustomSteps([2, 99]), [2, 8]),
        (AnyPreservationPolicy([EveryNSteps(4), CustomSteps([1])]), [1, 4, 8]),
    ],
    ids=str,
)
def test_policy_keeps_these_of_eight_steps(policy: PreservationPolicy, expected: list[int]) -> None:
    assert kept_steps(policy, EVERY_SECOND) == expected


@given(policy=every_policy, infos=histories)
def test_the_newest_is_always_kept(policy: PreservationPolicy, infos: list[CheckpointInfo]) -> None:
    answers = kept(policy, infos, context=NOW)
    assert len(answers) == len(infos)
    assert {type(answer) for answer in answers} <= {bool}
    assert answers[-1:] in ((True,), ())


@given(policy=every_policy, infos=histories, data=st.data())
def test_the_order_of_the_list_does_not_matter(
    policy: PreservationPolicy, infos: list[CheckpointInfo], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(infos))
    assert sorted(kept_steps(policy, shuffled)) == kept_steps(policy, infos)


@given(policy=any_keeper(built_in_keepers), infos=histories)
def test_asking_again_about_what_was_kept_keeps_it_all(
    policy: PreservationPolicy, infos: list[CheckpointInfo]
) -> None:
    answers = kept(policy, infos, context=NOW)
    left = [info for info, stays in zip(infos, answers, strict=True) if stays]
    assert all(kept(policy, left, context=NOW))


@given(policy=every_policy)
def test_nothing_is_kept_of_nothing(policy: PreservationPolicy) -> None:
    assert kept(policy, [], context=NOW) == ()


@given(infos=histories)
def test_latest_n_of_none_keeps_all(infos: list[CheckpointInfo]) -> None:
    assert all(kept(LatestN(None), infos, context=NOW))


@given(n=counts, infos=histories)
def test_latest_n_keeps_the_n_highest_steps(n: int, infos: list[CheckpointInfo]) -> None:
    steps = kept_steps(LatestN(n), infos)
    assert len(steps) == min(n, len(infos))
    assert steps == [info.step for info in infos][len(infos) - len(steps) :]


@given(interval_secs=secs, infos=histories.filter(len))
def test_every_n_seconds_keeps_the_first_and_no_two_that_are_close(
    interval_secs: float, infos: list[CheckpointInfo]
) -> None:
    answers = EveryNSeconds(interval_secs).should_preserve(infos, context=NOW)
    assert answers[0]
    last = infos[0].time
    for info, stays in zip(infos[1:], answers[1:], strict=True):
        apart_secs = abs((info.time - last).total_seconds())
        assert stays is (apart_secs >= interval_secs)
        last = info.time if stays else last


def test_clock_that_was_set_back_does_not_suspend_every_n_seconds() -> None:
    infos = [checkpoint(1, 0), checkpoint(2, -1000), checkpoint(3, -995), checkpoint(4, -990)]
    infos.append(checkpoint(5, -989))
    assert kept_steps(EveryNSeconds(10), infos) == [1, 2, 4, 5]


def metric_history(*values: float | None) -> list[CheckpointInfo]:
    """Steps 1, 2 … with these losses; None: no loss. A last step has the worst rank there is."""
    infos = [
        checkpoint(step, metrics={} if value is None else {"loss": value})
        for step, value in enumerate(values, 1)
    ]
    return [*infos, checkpoint(100)]


@pytest.mark.parametrize(
    ("n", "mode", "losses", "expected"),
    [
        (1, "min", [3.0, 1.0, 2.0], [2]),
        (1, "max", [3.0, 1.0, 2.0], [1]),
        (2, "min", [3.0, 1.0, 2.0], [2, 3]),
        (1, "min", [1.0, 1.0, 1.0], [3]),
        (1, "max", [1.0, 1.0, 1.0], [3]),
        (2, "min", [1.0, 1.0, 0.0, 1.0], [3, 4]),
        (1, "min", [INF, -INF, 0.0], [2]),
        (1, "max", [INF, -INF, 0.0], [1]),
        (1, "min", [0.0, -0.0, 1.0], [2]),
    ],
)
def test_best_n_keeps_the_best_and_of_equals_the_later(
    n: int, mode: Any, losses: list[float], expected: list[int]
) -> None:
    policy = BestN(n, metric="loss", mode=mode)
    assert kept_steps(policy, metric_history(*losses)) == [*expected, 100]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("worst_number", [INF, -INF])
def test_nan_metric_ranks_below_every_number(mode: Any, worst_number: float) -> None:
    for losses in ([NAN, worst_number], [worst_number, NAN]):
        policy = BestN(1, metric="loss", mode=mode)
        best = losses.index(worst_number) + 1
        assert kept_steps(policy, metric_history(*losses)) == [best, 100]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_missing_metric_ranks_below_nan(mode: Any) -> None:
    policy = BestN(1, metric="loss", mode=mode)
    assert kept_steps(policy, metric_history(NAN, None)) == [1, 100]
    assert kept_steps(policy, metric_history(None, NAN)) == [2, 100]
    others = [checkpoint(1, metrics={"loss": NAN}), checkpoint(2, metrics={"accuracy": 1.0})]
    assert kept_steps(policy, [*others, checkpoint(3)]) == [1, 3]


@given(n=st.integers(1, 6), mode=st.sampled_from(["min", "max"]), infos=histories)
def test_nothing_that_best_n_drops_is_better_than_what_it_keeps(
    n: int, mode: Any, infos: list[CheckpointInfo]
) -> None:
    answers = BestN(n, metric="loss", mode=mode).should_preserve(infos, context=NOW)
    assert sum(answers) == min(n, len(infos))

    def is_better(a: CheckpointInfo, b: CheckpointInfo) -> bool:
        x, y = ((info.metrics or {}).get("loss") for info in (a, b))
        if x is None or y is None:
            return a.step > b.step if x is y else y is None
        if math.isnan(x) or math.isnan(y):
            return a.step > b.step if math.isnan(x) and math.isnan(y) else math.isnan(y)
        if x == y:
            return a.step > b.step
        return x < y if mode == "min" else x > y

    for a, stays in zip(infos, answers, strict=True):
        for b, other_stays in zip(infos, answers, strict=True):
            assert not (other_stays and not stays and is_better(a, b))


@given(members=st.lists(every_policy, min_size=1, max_size=4), infos=histories)
def test_any_keeps_exactly_what_a_member_keeps(
    members: list[PreservationPolicy], infos: list[CheckpointInfo]
) -> None:
    whole = AnyPreservationPolicy(members).should_preserve(infos, context=NOW)
    answers = [member.should_preserve(infos, context=NOW) for member in members]
    assert list(whole) == [any(answer[i] for answer in answers) for i in range(len(infos))]


@given(policy=every_policy, infos=histories)
def test_the_shares_of_a_split_keep_together_what_the_whole_keeps(
    policy: PreservationPolicy, infos: list[CheckpointInfo]
) -> None:
    shares = [share for share in split(policy) if share is not None]
    answers = [kept(share, infos, context=NOW) for share in shares]
    together = tuple(any(answer[i] for answer in answers) for i in range(len(infos)))
    assert together == kept(policy, infos, context=NOW)


def test_every_member_is_in_the_share_of_its_kind() -> None:
    a, b, c, d = LatestN(1), keeps_nothing(), BestN(2, metric="x"), keeps_nothing()
    by_agent, by_user = split(AnyPreservationPolicy([a, AnyPreservationPolicy([b, c]), d]))
    assert by_agent == AnyPreservationPolicy([a, c])
    assert isinstance(by_user, AnyPreservationPolicy)
    assert by_user.policies == (b, d)
    assert split(a) == (a, None)
    assert split(b) == (None, b)


def test_subclass_of_a_built_in_policy_is_a_users_own() -> None:
    class Mine(LatestN, frozen=True):  # type: ignore[misc]
        pass

    assert split(Mine(1)) == (None, Mine(1))
