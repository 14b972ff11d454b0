"""Record how far the trainers are, from what they publish: events of steps without one per step.

The training thread writes its step to a cell of shared memory anyway. The agent reads the cells at
its ticks, so this costs the training nothing. A step that begins or ends between two ticks is
attributed to what was under way at either of them.

Owned by the agent's event loop.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum

from holdfast.agent.control_block import (
    NO_STEP,
    ControlBlock,
    blocked_cell,
    first_step_cell,
    first_time_cell,
    notice_cell,
    step_cell,
)
from holdfast.agent.trainer_group import TrainerProcess
from holdfast.clock import Clock
from holdfast.events.schema import (
    FirstStep,
    PreemptionNoticed,
    RankPosition,
    StepProgress,
    StepTimes,
)
from holdfast.events.writer import EventWriter
from holdfast.format.names import STEP_MAX

PROGRESS_SECS = 10.0
IDLE_SECS = 60.0
"""How often the positions are recorded while no step is made."""
SAMPLES_MAX = 1000
TIME_MAX_US = 10**17


class SavePhase(IntEnum):
    """What is under way during a step; the greatest counts."""

    QUIET = 0
    WRITING = 1
    SEALING = 2


@dataclass(slots=True)
class _Durations:
    steps: int = 0
    secs: float = 0.0
    samples_secs: list[float] = field(default_factory=list)

    def add(self, steps: int, secs: float) -> None:
        self.steps += steps
        self.secs += secs
        if len(self.samples_secs) < SAMPLES_MAX:
            self.samples_secs.append(secs / steps)

    def times(self) -> StepTimes:
        if not self.steps:
            return StepTimes()
        median_secs = statistics.median(self.samples_secs)
        return StepTimes(
            steps=self.steps, secs=round(self.secs, 4), median_secs=round(median_secs, 6)
        )


@dataclass(slots=True)
class _Seat:
    """What was seen of one trainer; `since_secs` is when its step was seen first."""

    first: tuple[int, int] = (NO_STEP, 0)
    step: int = NO_STEP
    since_secs: float = 0.0
    has_notice: bool = False


class StepMeter:
    """Writes `first_step`, `preempted` and `progress` of the trainers of one host."""

    def __init__(self, control: ControlBlock, events: EventWriter, clock: Clock) -> None:
        self._cells = control.cells
        self._events = events
        self._clock = clock
        self._seats: dict[int, _Seat] = {}
        self._durations = {phase: _Durations() for phase in SavePhase}
        self._phase = SavePhase.QUIET
        self._positions: dict[int, RankPosition] = {}
        self._recorded: dict[int, RankPosition] = {}
        self._recorded_secs = clock.monotonic()

    def adopt_members(self, members: Sequence[TrainerProcess]) -> None:
        """Take over trainers whose first step and notice an earlier agent has recorded."""
        for member in members:
            self._seats[member.seat] = _Seat(
                first=self._first(member), has_notice=bool(self._cells[notice_cell(member.seat)])
            )

    def note_save(self) -> None:
        """Record that a save has begun; it may end before the next tick."""
        self._phase = SavePhase.SEALING

    def read_progress(self, members: Sequence[TrainerProcess], phase: SavePhase) -> None:
        """Read the cells of the present trainers, and record their progress when it is due."""
        now_secs = self._clock.monotonic()
        self._phase = max(self._phase, phase)
        timed = min(members, key=lambda member: member.rank, default=None)
        for member in members:
            seat = self._look(member)
            if member is timed:
                self._time(seat, self._cells[step_cell(member.seat)], now_secs, phase)
        waited_secs = now_secs - self._recorded_secs
        has_changed = self._positions != self._recorded
        if self._positions and waited_secs >= (PROGRESS_SECS if has_changed else IDLE_SECS):
            self._record(now_secs)

    def leave(self, member: TrainerProcess) -> tuple[int | None, float]:
        """Read the cells of a trainer that has ended a last time, and forget it.

        Returns:
            Its last step, and for how many seconds saves have blocked it.
        """
        self._look(member)
        self._seats.pop(member.seat, None)
        if self._positions:
            self._record(self._clock.monotonic())
        position = self._positions.pop(member.rank, None)
        self._recorded.pop(member.rank, None)
        return (position.step, position.blocked_secs) if position is not None else (None, 0.0)

    def _look(self, member: TrainerProcess) -> _Seat:
        """Record the first step and the notice of a trainer, and take its position."""
        cells, seat = self._cells, self._seats.setdefault(member.seat, _Seat())
        first, step = self._first(member), cells[step_cell(member.seat)]
        # Trainers write these cells, so their values are bounded here.
        if first != seat.first and 0 <= first[0] <= STEP_MAX and 0 <= first[1] <= TIME_MAX_US:
            seat.first, seat.step = first, NO_STEP
            time = datetime.fromtimestamp(first[1] / 1e6, UTC)
            self._events.write(FirstStep(time=time, rank=member.rank, step=first[0]))
        if 0 <= step <= STEP_MAX:
            blocked_secs = max(0, cells[blocked_cell(member.seat)]) / 1e9
            position = RankPosition(step=step, blocked_secs=round(blocked_secs, 4))
            self._positions[member.rank] = position
        if cells[notice_cell(member.seat)] and not seat.has_notice:
            seat.has_notice = True
            last_step = step if 0 <= step <= STEP_MAX else None
            self._events.write(PreemptionNoticed(rank=member.rank, last_step=last_step))
        return seat

    def _first(self, member: TrainerProcess) -> tuple[int, int]:
        return (
            self._cells[first_step_cell(member.seat)],
            self._cells[first_time_cell(member.seat)],
        )

    def _time(self, seat: _Seat, step: int, now_secs: float, phase: SavePhase) -> None:
        if step == seat.step or seat.first[0] == NO_STEP:
            return
        # A restore publishes its step too; a step that follows none is not a duration.
        if seat.first[0] <= seat.step < step:
            self._durations[self._phase].add(step - seat.step, now_secs - seat.since_secs)
        seat.step, seat.since_secs = step, now_secs
        self._phase = phase

    def _record(self, now_secs: float) -> None:
        durations = self._durations
        self._events.write(
            StepProgress(
                ranks=dict(sorted(self._positions.items())),
                quiet=durations[SavePhase.QUIET].times(),
                sealing=durations[SavePhase.SEALING].times(),
                writing=durations[SavePhase.WRITING].times(),
            )
        )
        self._durations = {phase: _Durations() for phase in SavePhase}
        self._recorded, self._recorded_secs = dict(self._positions), now_secs
