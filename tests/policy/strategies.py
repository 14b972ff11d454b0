"""Policies, checkpoints and contexts for the tests of `holdfast.policy`: by hand and at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from holdfast import preservation_policy, save_decision_policy
from holdfast.policy.contexts import CheckpointInfo, PreservationContext, SaveContext

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(secs: float) -> datetime:
    """The time so many seconds after `START`."""
    return START + timedelta(seconds=secs)


def checkpoint(
    step: int, secs: float = 0, metrics: Mapping[str, float] | None = None
) -> CheckpointInfo:
    return CheckpointInfo(step, at(secs), metrics)


def save_context(
    secs: float = 0,
    *,
    saving: bool = False,
    preempted: bool = False,
    cost_secs: float | None = None,
) -> SaveContext:
    return SaveContext(
        now=at(secs),
        is_saving_in_progress=saving,
        reached_preemption=preempted,
        save_cost_secs=cost_secs,
    )


NOW = PreservationContext(START)


class UserSavePolicy:
    """A user's own save policy; it subclasses nothing."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> Any:
        return self.answer


class UserPreservationPolicy:
    """A user's own preservation policy: any function of the checkpoints."""

    def __init__(self, answer: Callable[[Sequence[CheckpointInfo]], Any]) -> None:
        self.answer = answer

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Any:
        return self.answer(checkpoints)


def keeps_nothing() -> UserPreservationPolicy:
    return UserPreservationPolicy(lambda checkpoints: [False] * len(checkpoints))


# Small ranges, so that equal times, equal metrics and multiples of intervals are common.
counts = st.integers(1, 6) | st.integers(1, 2**63 - 1)
steps = st.integers(0, 30)
secs = st.sampled_from([1.0, 2.0, 3.5, 10.0]) | st.floats(
    0, 1e9, exclude_min=True, allow_subnormal=False
)
step_lists = st.lists(steps, min_size=1, max_size=5)
metric_values = st.sampled_from([0.0, 1.0, 2.0, float("inf"), float("-inf"), float("nan")])
metrics = st.none() | st.dictionaries(st.sampled_from(["loss", "accuracy"]), metric_values)
checkpoints = st.builds(checkpoint, steps, st.integers(-20, 20), metrics)
save_contexts = st.builds(
    save_context, st.integers(-20, 20), saving=st.booleans(), preempted=st.booleans()
)


def _ascending(found: list[CheckpointInfo]) -> list[CheckpointInfo]:
    return sorted(found, key=lambda info: info.step)


histories = st.lists(checkpoints, max_size=12, unique_by=lambda info: info.step).map(_ascending)

by_step = st.builds(save_decision_policy.FixedIntervalPolicy, counts) | st.builds(
    save_decision_policy.SpecificStepsPolicy, step_lists
)
by_agent = st.builds(
    save_decision_policy.ContinuousCheckpointingPolicy,
    st.none() | secs,
    st.none() | st.floats(0.001, 1),
) | st.just(save_decision_policy.PreemptionCheckpointingPolicy())
user_save_policies = st.builds(UserSavePolicy, st.booleans())

counted = (preservation_policy.LatestN, preservation_policy.EveryNSteps)
built_in_keepers = st.one_of(
    *(st.builds(kind, counts) for kind in counted),
    st.builds(preservation_policy.EveryNSeconds, secs),
    st.builds(preservation_policy.CustomSteps, step_lists),
    st.builds(
        preservation_policy.BestN,
        counts,
        metric=st.sampled_from(["loss", "accuracy", "größe"]),
        mode=st.sampled_from(["min", "max"]),
    ),
)
user_keepers = st.just(keeps_nothing()) | st.sets(steps).map(
    lambda chosen: UserPreservationPolicy(lambda infos: [info.step in chosen for info in infos])
)


def any_save(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One of `members`, or an "any" of some, itself perhaps within another."""
    return _nested(members, save_decision_policy.AnySavePolicy)


def any_keeper(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The same for preservation."""
    return _nested(members, preservation_policy.AnyPreservationPolicy)


def _nested(members: st.SearchStrategy[Any], kind: Callable[[Any], Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        members, lambda inner: st.lists(inner, min_size=1, max_size=4).map(kind), max_leaves=8
    )
