"""Which targets a save meets."""

from __future__ import annotations

import pytest

from holdfast import save_decision_policy
from holdfast.host.wire.control_block import (
    NEVER,
    PREEMPTION_CONFIRMED,
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


def due_at(
    schedule: SaveSchedule, step: int, targets: dict[int, int], decided: int | None = None
) -> Due:
    """Return what is due at a step, the one after `decided` if nothing is given."""
    cells = [targets.get(cell, NEVER) for cell in range(16)]
    decided = step - 1 if decided is None else decided
    return schedule.due(step, cells, decided=decided, is_stopping_alone=False, force=False)


@pytest.mark.parametrize("process_count", [1, 2])
def test_a_save_meets_the_targets_of_its_step(process_count: int) -> None:
    schedule = SaveSchedule(None, OPTIONS, process_count)
    for target in ALL:
        assert due_at(schedule, 7, {target: 7}).met == (target,)
    assert set(due_at(schedule, 7, dict.fromkeys(ALL, 7)).met) == ALL
    assert due_at(schedule, 7, dict.fromkeys(ALL, 8)).met == ()
    # Due by the policy, which no agent has asked for.
    assert due_at(schedule, 10, {}).met == ()


def test_only_a_rank_that_is_alone_meets_a_target_at_a_later_step() -> None:
    alone, one_of_two = SaveSchedule(None, OPTIONS, 1), SaveSchedule(None, OPTIONS, 2)
    for decided in (5, 8):
        due = due_at(alone, 9, {TARGET_DURABLE: 7}, decided)
        assert (due.durable, due.met) == (True, (TARGET_DURABLE,))
    # It saves every third step; the other ranks do so too.
    due = due_at(one_of_two, 9, {TARGET_DURABLE: 7}, decided=6)
    assert (due.durable, due.met) == (True, ())


@pytest.mark.parametrize("cell", sorted(ALL))
def test_a_target_that_one_of_several_ranks_has_missed_is_left_to_a_later_one(cell: int) -> None:
    schedule = SaveSchedule(None, OPTIONS, 2)
    for step in (22, 23):
        assert not due_at(schedule, step, {cell: 21}).is_any
    assert schedule.stop.has_missed == (cell == TARGET_PREEMPTION)
    due = due_at(schedule, 26, {cell: 26})
    assert (due.is_any, due.met) == (True, (cell,))
    # There was no room for its save.
    assert due_at(schedule, 27, {cell: 26}).is_any
    schedule.went_back(19)
    assert due_at(schedule, 20, {cell: 20}).is_any


def test_a_step_to_stop_at_that_all_hosts_have_confirmed_is_none_to_miss() -> None:
    schedule = SaveSchedule(None, OPTIONS, 2)
    assert due_at(schedule, 22, {TARGET_PREEMPTION: 21, PREEMPTION_CONFIRMED: 21}).is_preemption


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
