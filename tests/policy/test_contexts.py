"""The inputs of policies are checked at construction and normalised."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import numpy as np
import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.policy.contexts import CheckpointInfo, PreservationContext, SaveContext
from tests.policy.strategies import START

NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001 - what is to be refused
EASTERN = timezone(timedelta(hours=5))


@pytest.mark.parametrize(
    "time",
    [
        NAIVE,
        None,
        1767225600.0,
        "2026-01-01",
        datetime.max.replace(tzinfo=timezone(-timedelta(1) / 2)),
    ],
    ids=repr,
)
def test_time_that_is_no_instant_is_refused(time: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^CheckpointInfo: expected time to be"):
        CheckpointInfo(1, time)
    with pytest.raises(InvalidArgumentError, match=r"^PreservationContext: expected now to be"):
        PreservationContext(time)
    with pytest.raises(InvalidArgumentError, match=r"^SaveContext: expected now to be"):
        SaveContext(now=time, is_saving_in_progress=False, reached_preemption=False)


@pytest.mark.parametrize("step", [-1, True, 1.0, None, "1", 10**15 + 1], ids=repr)
def test_step_that_is_none_is_refused(step: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^CheckpointInfo: expected step to be"):
        CheckpointInfo(step, START)


@pytest.mark.parametrize(
    "metrics", [[("loss", 1.0)], 3.0, {"loss": "1"}, {"loss": None}, {1: 1.0}, {"": 1.0}], ids=repr
)
def test_metrics_that_are_no_numbers_by_name_are_refused(metrics: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^CheckpointInfo: expected .*metrics"):
        CheckpointInfo(1, START, metrics)


def test_times_are_held_in_utc() -> None:
    info = CheckpointInfo(np.int32(1), datetime(2026, 1, 1, 5, tzinfo=EASTERN))  # type: ignore[arg-type]
    assert info == CheckpointInfo(1, START)
    assert info.time.tzinfo is UTC
    assert type(info.step) is int


class ChangesToWinterTime(tzinfo):
    """A zone within the hour that is there twice: `fold` distinguishes the second."""

    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(hours=1 if when and when.fold else 2)

    def dst(self, when: datetime | None) -> timedelta:
        return self.utcoffset(when) - timedelta(hours=1)


def test_a_clock_that_changes_to_winter_time_adds_no_hour_and_loses_none() -> None:
    zone = ChangesToWinterTime()
    before = PreservationContext(datetime(2026, 10, 25, 2, 30, fold=0, tzinfo=zone))
    after = PreservationContext(datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zone))
    assert after.now - before.now == timedelta(hours=1)


def test_metrics_are_a_copy_of_floats_and_may_be_nan() -> None:
    given = {"loss": np.float32(0.5), "nan": float("nan"), "count": 3}
    info = CheckpointInfo(1, START, given)  # type: ignore[arg-type]
    given.clear()
    assert info.metrics is not None
    assert info.metrics["loss"] == 0.5
    assert math.isnan(info.metrics["nan"])
    assert {type(value) for value in info.metrics.values()} == {float}


def test_infos_and_contexts_are_frozen() -> None:
    context = SaveContext(now=START, is_saving_in_progress=False, reached_preemption=False)
    for value in (CheckpointInfo(1, START), PreservationContext(START), context):
        for field in value.__struct_fields__:
            with pytest.raises(AttributeError):
                setattr(value, field, None)
