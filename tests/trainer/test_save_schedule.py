"""Which targets a save meets."""

from __future__ import annotations

import pytest

from holdfast import save_decision_policy
from holdfast.host.wire.control_block import (
    NEVER,
    TARGET_DURABLE,
    TARGET_PREEMPTION,
    TARGET_RAM,
)
from holdfast.policy.preservation_policy import LatestN
from holdfast.trainer.options import Options
from holdfast.trainer.save.save_schedule import Due, SaveSchedule

OPTIONS = Options(
    save=save_decision_policy.FixedIntervalPolicy(10),
    preservation=LatestN(1),
    ram=None,
    takeover=False,
)
ALL = {TARGET_DURABLE, TARGET_RAM, TARGET_PREEMPTION}


def due_at(schedule: SaveSchedule, step: int, targets: dict[int, int]) -> Due:
    cells = [targets.get(cell, NEVER) for cell in range(16)]
    return schedule.due(step, cells, is_stopping_alone=False, force=False)


@pytest.mark.parametrize("process_count", [1, 2])
def test_a_save_meets_the_targets_of_its_step(process_count: int) -> None:
    schedule = SaveSchedule(None, OPTIONS, process_count)
    for target in ALL:
        assert due_at(schedule, 7, {target: 7}).met == (target,)
    assert set(due_at(schedule, 7, dict.fromkeys(ALL, 7)).met) == ALL
    assert due_at(schedule, 7, dict.fromkeys(ALL, 8)).met == ()
    # Due by the policy, which no agent has asked for.
    assert due_at(schedule, 10, {}).met == ()


@pytest.mark.parametrize(("process_count", "met"), [(1, (TARGET_DURABLE,)), (2, ())])
def test_only_a_rank_that_is_alone_meets_a_target_at_a_later_step(
    process_count: int, met: tuple[int, ...]
) -> None:
    schedule = SaveSchedule(None, OPTIONS, process_count)
    due = due_at(schedule, 9, {TARGET_DURABLE: 7})
    assert due.durable
    assert due.met == met


def test_a_target_is_met_once() -> None:
    schedule = SaveSchedule(None, OPTIONS, 1)
    schedule.note_taken(7, due_at(schedule, 7, {TARGET_DURABLE: 7}))
    # The agent has not cleared it yet.
    assert due_at(schedule, 10, {TARGET_DURABLE: 7}).met == ()
    assert due_at(schedule, 10, {TARGET_DURABLE: 9}).met == (TARGET_DURABLE,)


def test_a_target_that_is_written_after_a_save_was_decided_is_not_taken_for_served() -> None:
    schedule = SaveSchedule(None, OPTIONS, 1)
    schedule.note_taken(10, due_at(schedule, 10, {}))
    assert due_at(schedule, 11, {TARGET_DURABLE: 10}).met == (TARGET_DURABLE,)


def test_a_rank_that_has_stopped_meets_no_other_target_to_stop_at() -> None:
    schedule = SaveSchedule(None, OPTIONS, 2)
    schedule.stop.at = 5
    due = due_at(schedule, 7, {TARGET_PREEMPTION: 7})
    assert (due.is_preemption, due.met) == (False, ())
