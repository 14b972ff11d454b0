"""When a checkpoint that is under way still holds the next one back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.clock import SystemClock
from holdfast.coordination.messages import TargetKind
from holdfast.host.metering.meters import Metering
from holdfast.host.trainers.save_scheduler import SaveScheduler, is_almost_durable


@pytest.mark.parametrize(
    ("pending_count", "left_secs", "step_secs", "expected"),
    [
        (1, 5.0, 1.0, False),
        (1, 1.0, 1.0, True),
        # It takes longer than the last one: it may be durable at any time.
        (1, -30.0, 1.0, True),
        # The training is a checkpoint ahead already.
        (2, -30.0, 1.0, False),
        (1, None, 1.0, False),
        (1, 0.0, None, False),
    ],
)
def test_the_next_checkpoint_is_asked_for_about_a_step_before_the_one_before_is_durable(
    pending_count: int, left_secs: float | None, step_secs: float | None, expected: bool
) -> None:
    at_secs = left_secs if left_secs is None else 100.0 + left_secs
    assert is_almost_durable(pending_count, at_secs, 100.0, step_secs) is expected


@pytest.mark.parametrize(("pending_count", "expected"), [(1, False), (2, True)])
def test_the_scheduler_counts_what_is_on_its_way(pending_count: int, expected: bool) -> None:
    clock = SystemClock()
    lead = SimpleNamespace(is_saving=True, is_sealing=False)
    view = SimpleNamespace(lead=lead, pending_ids=lambda: [None] * pending_count)
    run: Any = SimpleNamespace(clock=clock)
    trainers: Any = SimpleNamespace(filling={})
    driver: Any = SimpleNamespace(view=view)
    metering = Metering(clock)
    metering.save_times.durable_at_secs = clock.monotonic()
    scheduler = SaveScheduler(run, trainers, driver, metering)
    scheduler._pace.step_secs = 1.0
    assert scheduler._is_saving(TargetKind.DURABLE) is expected
    # RAM takes the next one as soon as it has the one before.
    assert not scheduler._is_saving(TargetKind.RAM)
    lead.is_sealing = True
    assert scheduler._is_saving(TargetKind.DURABLE)
    assert scheduler._is_saving(TargetKind.RAM)
