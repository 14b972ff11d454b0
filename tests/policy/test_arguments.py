"""A policy that cannot mean anything is refused when it is made."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import InvalidArgumentError
from tests.policy.strategies import UserPreservationPolicy, UserSavePolicy

NAN, INF = float("nan"), float("inf")


def best_n(n: Any) -> preservation_policy.BestN:
    return preservation_policy.BestN(n, metric="loss")


COUNTED: dict[str, Callable[[Any], Any]] = {
    "FixedIntervalPolicy interval": save_decision_policy.FixedIntervalPolicy,
    "LatestN n": preservation_policy.LatestN,
    "EveryNSteps n": preservation_policy.EveryNSteps,
    "BestN n": best_n,
}
TIMED: dict[str, Callable[[Any], Any]] = {
    "ContinuousCheckpointingPolicy minimum_interval_secs": (
        save_decision_policy.ContinuousCheckpointingPolicy
    ),
    "EveryNSeconds secs": preservation_policy.EveryNSeconds,
}
LISTED: dict[str, Callable[[Any], Any]] = {
    "SpecificStepsPolicy steps": save_decision_policy.SpecificStepsPolicy,
    "CustomSteps steps": preservation_policy.CustomSteps,
}
COMPOSED: dict[str, Callable[[Any], Any]] = {
    "AnySavePolicy policies": save_decision_policy.AnySavePolicy,
    "AnyPreservationPolicy policies": preservation_policy.AnyPreservationPolicy,
}


def both(kinds: dict[str, Callable[[Any], Any]], values: list[Any]) -> list[Any]:
    return [
        pytest.param(name, make, value, id=f"{name.split()[0]}-{type(value).__name__}")
        for name, make in kinds.items()
        for value in values
    ]


@pytest.mark.parametrize(
    ("name", "make", "value"),
    [
        *both(COUNTED, [0, -1, True, 1.0, 2.5, NAN, INF, "3", [1], 2**63, np.True_]),
        *both({k: v for k, v in COUNTED.items() if k != "LatestN n"}, [None]),
        *both(COUNTED, [np.int64(0), np.float64(1), 10**5000]),
        *both(TIMED, [0, -1, 0.0, NAN, INF, -INF, True, "3", 1j, Decimal(3), [1], 10**400]),
        *both(TIMED, [np.float32("nan"), np.True_, np.array([1.0])]),
        *both(LISTED, [[], (), {1.5}, [1, -1], [True], [NAN], [None], 3, None, "12", b"\x01"]),
        *both(LISTED, [np.array(3), [[1]], [10**15 + 1], range(0)]),
        *both(COMPOSED, [[], (), None, 3, "ab", [3], [None], {}]),
    ],
)
def test_meaningless_argument_is_refused_by_class_and_name(
    name: str, make: Callable[[Any], Any], value: Any
) -> None:
    class_name, argument = name.split()
    with pytest.raises(
        InvalidArgumentError, match=rf"^{class_name}: expected {argument}\b.* to be .*, found .+"
    ):
        make(value)


@pytest.mark.parametrize("make", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)], ids=repr)
def test_integers_of_every_kind_are_held_as_int(make: Callable[[Any], Any], value: Any) -> None:
    policy = make(value)
    assert policy == make(7)
    held = policy.interval if hasattr(policy, "interval") else policy.n
    assert type(held) is int


def test_everything_is_kept_by_the_largest_count() -> None:
    assert preservation_policy.LatestN(2**63 - 1).n == 2**63 - 1


@pytest.mark.parametrize("make", TIMED.values(), ids=TIMED)
@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3)], ids=repr)
def test_seconds_of_every_kind_are_held_as_float(make: Callable[[Any], Any], value: Any) -> None:
    policy = make(value)
    assert policy == make(3.0)
    assert repr(make(value)) == repr(make(3.0))


@pytest.mark.parametrize("make", LISTED.values(), ids=LISTED)
@pytest.mark.parametrize(
    "given",
    [
        lambda: [5, 1, 5, 3],
        lambda: {1, 3, 5},
        lambda: range(1, 6, 2),
        lambda: np.array([3, 5, 1]),
        lambda: iter([1, 3, 5]),
    ],
    ids=["list", "set", "range", "array", "iterator"],
)
def test_steps_are_held_ascending_without_repetitions(
    make: Callable[[Any], Any], given: Callable[[], Any]
) -> None:
    steps = make(given()).steps
    assert steps == (1, 3, 5)
    assert all(type(step) is int for step in steps)


def test_a_list_that_changes_later_changes_no_policy() -> None:
    steps = [1, 2]
    policies = [preservation_policy.LatestN(1)]
    custom = preservation_policy.CustomSteps(steps)
    composed = preservation_policy.AnyPreservationPolicy(policies)
    steps.append(3)
    policies.clear()
    assert custom.steps == (1, 2)
    assert composed.policies == (preservation_policy.LatestN(1),)


@pytest.mark.parametrize("make", [*COUNTED.values(), *TIMED.values()])
def test_a_policy_is_frozen_and_hashable(make: Callable[[Any], Any]) -> None:
    policy = make(2)
    assert len({policy, make(2), make(3)}) == 2
    for field in policy.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(policy, field, 5)


class NoMethod:
    should_save = None
    should_preserve = 3


@pytest.mark.parametrize(
    ("make", "member"),
    [
        (save_decision_policy.AnySavePolicy, NoMethod()),
        (save_decision_policy.AnySavePolicy, UserPreservationPolicy(list)),
        (save_decision_policy.AnySavePolicy, preservation_policy.LatestN(1)),
        (save_decision_policy.AnySavePolicy, save_decision_policy.PreemptionCheckpointingPolicy),
        (preservation_policy.AnyPreservationPolicy, NoMethod()),
        (preservation_policy.AnyPreservationPolicy, UserSavePolicy(True)),
        (preservation_policy.AnyPreservationPolicy, preservation_policy.LatestN),
    ],
)
def test_member_that_is_no_policy_is_refused_by_its_place(
    make: Callable[[Any], Any], member: Any
) -> None:
    good = {
        save_decision_policy.AnySavePolicy: UserSavePolicy(True),
        preservation_policy.AnyPreservationPolicy: UserPreservationPolicy(list),
    }[make]  # type: ignore[index]
    with pytest.raises(InvalidArgumentError, match=r"policies\[1\] .* method should_"):
        make([good, member])


@pytest.mark.parametrize("metric", ["", None, 3, "\ud800"], ids=repr)
def test_metric_that_is_no_name_is_refused(metric: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^BestN: expected metric to be"):
        preservation_policy.BestN(1, metric=metric)


@pytest.mark.parametrize("mode", ["minimum", "", "MIN", None, True])
def test_mode_is_min_or_max(mode: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^BestN: expected mode to be 'min' or 'max'"):
        preservation_policy.BestN(1, metric="loss", mode=mode)


def test_only_the_count_of_best_n_is_positional() -> None:
    make: Any = preservation_policy.BestN
    with pytest.raises(TypeError, match="positional"):
        make(1, "loss")


def test_the_message_of_a_huge_argument_is_short() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        preservation_policy.LatestN("x" * 10**6)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300
