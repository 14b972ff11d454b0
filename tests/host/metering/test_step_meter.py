"""The agent records steps from what trainers publish, without an event per step."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.host.metering.step_meter import SavePhase, StepMeter
from holdfast.host.wire.control_block import (
    ControlBlock,
    blocked_before_cell,
    blocked_cell,
    blocked_step_cell,
    create_cells,
    first_step_cell,
    first_time_cell,
    notice_cell,
    step_cell,
    step_time_cell,
    wait_cells,
)
from holdfast.host.wire.group_record import TrainerProcess
from holdfast.observe.events.reader import EventReader, read_events
from holdfast.observe.events.schema import (
    WAIT_REASONS,
    CheckpointSealed,
    Event,
    FirstStep,
    PreemptionNoticed,
    RankPosition,
    StepProgress,
    StepTimes,
)
from holdfast.observe.events.writer import EventWriter
from holdfast.observe.metrics.measures import Measures
from holdfast.observe.reports.goodput import report_run
from holdfast.observe.reports.model import RunReport
from holdfast.store.run_directory import RunDirectory
from tests.observe.events.written import at
from tests.trust.in_process import StepClock

QUIET, WRITING, SEALING = SavePhase


class Rig:
    """A meter, the cells of two trainers, and a clock."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.clock = StepClock()
        self.control = create_cells(run / "words")
        self.events = EventWriter(RunDirectory(run), "a", self.clock)
        self.meter = StepMeter(self.control, self.events, self.clock, Measures(self.clock))
        self.members = [
            TrainerProcess(rank=rank, seat=rank + 5, pid=10 + rank, started=0.0) for rank in (0, 1)
        ]

    def first(self, step: int, secs: float, rank: int = 0) -> None:
        self.control.cells[first_time_cell(rank + 5)] = int(at(secs).timestamp() * 1e6)
        self.control.cells[first_step_cell(rank + 5)] = step

    def step(self, step: int, rank: int = 0) -> None:
        self.control.cells[step_cell(rank + 5)] = step

    def tick(self, secs: float, phase: SavePhase = QUIET) -> None:
        """Let time pass, and look."""
        self.clock.sleep(secs)
        self.meter.read_progress(self.members, phase)

    def found(self, kind: type[Event]) -> list:
        self.events.close()
        return read_events(self.run, kind)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_first_step_is_recorded_once_with_the_trainers_time(rig: Rig) -> None:
    rig.tick(0.1)
    rig.first(41, secs=3)
    rig.step(41)
    rig.tick(0.1)
    rig.step(42)
    rig.tick(0.1)
    rig.first(7, secs=9)
    rig.tick(0.1)
    found = rig.found(FirstStep)
    assert [(one.rank, one.step, one.time) for one in found] == [(0, 41, at(3)), (0, 7, at(9))]


def test_steps_are_timed_by_what_was_under_way(rig: Rig) -> None:
    rig.first(0, secs=0)
    rig.step(0)
    rig.tick(0.0)
    for step in range(1, 4):
        rig.step(step)
        rig.tick(1.0)
    rig.tick(0.5, SEALING)
    rig.step(4)
    rig.tick(1.0, WRITING)
    rig.step(5)
    rig.tick(1.25, WRITING)
    rig.step(7)
    rig.tick(2.0)
    rig.tick(10.0)
    (found,) = rig.found(StepProgress)
    assert found.quiet == StepTimes(steps=3, secs=3.0, median_secs=1.0, max_secs=1.0)
    assert found.sealing == StepTimes(steps=1, secs=1.5, median_secs=1.5, max_secs=1.5)
    assert found.writing == StepTimes(steps=3, secs=3.25, median_secs=1.125, max_secs=1.25)


def test_a_save_between_two_looks_counts(rig: Rig) -> None:
    rig.first(0, secs=0)
    rig.step(0)
    rig.tick(0.0)
    rig.meter.note_save()
    rig.step(1)
    rig.tick(1.0)
    rig.tick(10.0)
    assert rig.found(StepProgress)[0].sealing.steps == 1


def test_a_restore_is_no_step(rig: Rig) -> None:
    rig.step(40)
    rig.tick(0.1)
    rig.first(41, secs=0)
    rig.step(41)
    rig.tick(100.0)
    rig.step(20)
    rig.tick(1.0)
    rig.first(21, secs=200)
    rig.step(21)
    rig.tick(50.0)
    rig.step(22)
    rig.tick(1.0)
    rig.tick(10.0)
    found = rig.found(StepProgress)
    assert sum(one.quiet.steps for one in found) == 1
    assert sum(one.quiet.secs for one in found) == 1.0


def test_positions_are_recorded_every_ten_seconds_and_rarely_while_nothing_moves(rig: Rig) -> None:
    rig.first(0, secs=0)
    for step in range(400):
        rig.step(step)
        rig.step(step, rank=1)
        rig.tick(0.1)
    for _ in range(1200):
        rig.tick(0.1)
    found = rig.found(StepProgress)
    moving = [one for one in found if one.time <= at(1040)]
    assert 3 <= len(moving) <= 4
    assert 2 <= len(found) - len(moving) <= 3
    assert found[-1].ranks == {0: RankPosition(step=399), 1: RankPosition(step=399)}


def test_the_last_step_and_the_blocked_time_of_a_trainer_that_ends_are_read(rig: Rig) -> None:
    rig.first(0, secs=0)
    rig.step(8)
    rig.control.cells[blocked_cell(5)] = int(0.25e9)
    rig.control.cells[blocked_before_cell(5)] = int(0.05e9)
    rig.control.cells[blocked_step_cell(5)] = 8
    assert rig.meter.leave(rig.members[0]) == (8, 0.25)
    assert rig.meter.leave(rig.members[1]) == (None, 0.0)
    assert [one.step for one in rig.found(FirstStep)] == [0]
    assert rig.found(StepProgress)[0].ranks == {
        0: RankPosition(step=8, blocked_secs=0.25, blocked_after_secs=0.2)
    }


def test_a_preemption_is_recorded_once(rig: Rig) -> None:
    rig.step(3, rank=1)
    rig.control.cells[notice_cell(6)] = 1
    for _ in range(3):
        rig.tick(0.1)
    assert [(one.rank, one.last_step) for one in rig.found(PreemptionNoticed)] == [(1, 3)]


def test_the_next_agent_does_not_repeat_what_was_recorded(rig: Rig) -> None:
    rig.first(0, secs=0)
    rig.step(3)
    rig.control.cells[notice_cell(5)] = 1
    rig.meter.adopt_members(rig.members)
    rig.tick(0.1)
    assert rig.found(FirstStep) == []
    assert rig.found(PreemptionNoticed) == []


def test_cells_with_nonsense_are_ignored(rig: Rig) -> None:
    for cell in (
        first_step_cell,
        first_time_cell,
        blocked_cell,
        step_cell,
        notice_cell,
        step_time_cell,
        lambda seat: wait_cells(seat).since,
        lambda seat: wait_cells(seat).reason,
    ):
        for value in (-(2**62), 2**62):
            rig.control.cells[cell(5)] = value
            rig.tick(10.0)
    rig.control.cells[first_step_cell(5)] = 1
    rig.tick(10.0)
    assert rig.found(FirstStep) == []


def test_a_seat_has_cache_lines_of_its_own(tmp_path: Path) -> None:
    control: ControlBlock = create_cells(tmp_path / "words")
    assert step_cell(1) - step_cell(0) == 24
    assert len(WAIT_REASONS) == 4
    assert blocked_step_cell(0) < step_cell(1)
    assert len(control.cells) > blocked_cell(1015)


def test_steps_last_from_one_published_time_to_the_next(rig: Rig) -> None:
    rig.first(0, secs=0)
    for step, published_secs in ((0, 1000.5), (2, 1003.5), (3, 1005.0)):
        rig.step(step)
        rig.control.cells[step_time_cell(5)] = int(published_secs * 1e9)
        rig.tick(2.0)
    rig.tick(10.0)
    (found,) = rig.found(StepProgress)
    assert found.quiet == StepTimes(steps=3, secs=4.5, median_secs=1.5, max_secs=1.5)
    assert found.ranks == {0: RankPosition(step=3, step_age_secs=11.0)}


def test_the_steps_since_the_last_look_count_when_a_trainer_ends(rig: Rig) -> None:
    rig.first(0, secs=0)
    rig.step(0)
    rig.tick(1.0)
    rig.step(4)
    rig.clock.sleep(2.0)
    rig.meter.leave(rig.members[0])
    assert rig.found(StepProgress)[0].quiet.steps == 4


def test_ended_waits_and_the_present_one_are_recorded_by_reason(rig: Rig) -> None:
    cells, since_cell = rig.control.cells, wait_cells(5).since
    cells[wait_cells(5).ended.start] = int(3e9)
    rig.first(0, secs=0)
    rig.step(0)
    rig.tick(4.0)
    cells[wait_cells(5).before.start], cells[wait_cells(5).step] = int(3e9), 0
    cells[wait_cells(5).ended.start] = int(5e9)
    cells[wait_cells(5).reason], cells[since_cell] = 1, int(1012.5e9)
    rig.tick(10.0)
    assert rig.found(FirstStep)[0].waiting_secs == {"data": 3.0}
    (position,) = rig.found(StepProgress)[0].ranks.values()
    assert position.waiting_secs == {"data": 3.0}
    assert position.waiting_after_secs == {"data": 2.0, "evaluation": 1.5}


def test_waits_are_no_part_of_the_duration_of_a_step(rig: Rig) -> None:
    rig.first(0, secs=0)
    rig.step(0)
    rig.tick(1.0)
    cells = rig.control.cells
    cells[wait_cells(5).ended.start], cells[wait_cells(5).step] = int(2e9), 0
    rig.step(1)
    rig.tick(5.0)
    rig.tick(10.0)
    assert rig.found(StepProgress)[0].quiet == StepTimes(
        steps=1, secs=3.0, median_secs=3.0, max_secs=3.0
    )


def test_a_compilation_is_no_part_of_a_step_nor_of_the_cost_of_a_save(rig: Rig) -> None:
    cells, waits = rig.control.cells, wait_cells(5)
    rig.first(0, secs=0)
    rig.step(0)
    rig.tick(0.0)
    for step in range(1, 12):
        rig.step(step)
        rig.tick(1.0)
    cells[waits.before], cells[waits.step] = cells[waits.ended], 11
    cells[waits.ended.start + WAIT_REASONS.index("compilation")] = int(30e9)
    rig.tick(31.0, SEALING)
    rig.step(12)
    rig.tick(0.1)
    rig.step(13)
    rig.tick(10.0)
    sealing_secs = sum(progress.sealing.secs for progress in rig.found(StepProgress))
    assert sealing_secs < 1.2
    (position,) = rig.found(StepProgress)[-1].ranks.values()
    assert position.waiting_secs == {"compilation": 30.0}


def test_a_run_that_goes_back_is_recorded_as_far_as_it_was(rig: Rig) -> None:
    rig.first(0, secs=0)
    rig.step(0)
    rig.tick(1.0)
    rig.step(30)
    rig.tick(1.0)
    rig.step(10)
    rig.tick(1.0)
    assert rig.found(StepProgress)[0].ranks[0].step == 30


def report(rig: Rig) -> RunReport:
    """The report of the events so far."""
    rig.events.close()
    return report_run("run", EventReader(rig.run).read())


def cost_secs(rig: Rig) -> float | None:
    """What a checkpoint in RAM costs, by the report."""
    return report(rig).tiers["ram"].cost_secs


def saved(rig: Rig, step: int, secs: float, saving_secs: float) -> None:
    """A step at whose beginning a checkpoint is saved."""
    rig.meter.note_save()
    rig.tick(saving_secs)
    rig.events.write(CheckpointSealed(step=step, attempt=1, tier="ram"))
    rig.step(step)
    rig.tick(secs - saving_secs)


def trained(rig: Rig, quiet_secs: float, count: int = 20) -> None:
    """The start of a training, and some steps without a save."""
    rig.events.attempt = 1
    rig.first(0, secs=0)
    for step in range(count + 1):
        rig.step(step)
        rig.tick(quiet_secs)


def test_a_compilation_beside_a_save_of_milliseconds_is_no_cost_of_it(rig: Rig) -> None:
    trained(rig, 0.1)
    saved(rig, 21, secs=6.1, saving_secs=0.02)
    rig.tick(10.0)
    assert cost_secs(rig) == pytest.approx(0.02)


def test_steps_with_saves_of_a_few_milliseconds_are_compared_with_each_other(rig: Rig) -> None:
    trained(rig, 4.0, count=0)
    for step in range(1, 12):
        saved(rig, step, secs=4.0, saving_secs=0.005)
    rig.tick(10.0)
    assert cost_secs(rig) == 0.0
    progress = read_events(rig.run, StepProgress)
    assert sum(one.quiet.steps for one in progress) == 11
    assert not any("was not measured" in note for note in report(rig).notes)


def test_a_cost_is_not_known_before_eight_steps_without_a_save(rig: Rig) -> None:
    trained(rig, 0.1, count=7)
    saved(rig, 8, secs=0.3, saving_secs=0.2)
    rig.tick(10.0)
    assert cost_secs(rig) is None
    assert any("fewer than 8 steps without a save" in note for note in report(rig).notes)
