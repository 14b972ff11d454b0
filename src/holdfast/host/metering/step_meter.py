"""Record how far the trainers are, from what they publish: events of steps without one per step.

The training thread writes its step and the time to cells of shared memory. The agent reads the
cells at its ticks, so nothing else costs the training time. A tick follows each change of a save,
so that the time in which a checkpoint was being saved is known for each step.

Owned by the agent's event loop.

See docs/decisions/0045.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum

from msgspec import structs

from holdfast.clock import Clock
from holdfast.format.names import STEP_MAX
from holdfast.host.wire.control_block import (
    NO_STEP,
    ControlBlock,
    accepted_cell,
    blocked_before_cell,
    blocked_cell,
    blocked_step_cell,
    first_step_cell,
    first_time_cell,
    notice_cell,
    step_cell,
    step_time_cell,
    wait_cells,
)
from holdfast.host.wire.group_record import TrainerProcess
from holdfast.observe.events.schema import (
    WAIT_REASONS,
    FirstStep,
    PreemptionNoticed,
    RankPosition,
    StepProgress,
    StepTimes,
)
from holdfast.observe.events.writer import EventWriter
from holdfast.observe.metrics.measures import Measures
from holdfast.policy.step_cost import StepCost, is_quiet

PROGRESS_SECS = 10.0
IDLE_SECS = 60.0
"""How often the positions are recorded while no step is made."""
SAMPLES_MAX = 1000
CHANGES_MAX = 1000
"""How many changes of a phase are kept within one step; of more, the oldest are forgotten."""
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
    max_secs: float = 0.0
    samples_secs: list[float] = field(default_factory=list)

    def add(self, steps: int, secs: float) -> None:
        self.steps += steps
        self.secs += secs
        self.max_secs = max(self.max_secs, secs / steps)
        if len(self.samples_secs) < SAMPLES_MAX:
            self.samples_secs.append(secs / steps)

    def times(self) -> StepTimes:
        if not self.steps:
            return StepTimes()
        median_secs = statistics.median(self.samples_secs)
        return StepTimes(
            steps=self.steps,
            secs=round(self.secs, 4),
            median_secs=round(median_secs, 6),
            max_secs=round(self.max_secs, 6),
        )


class _PhaseTimes:
    """When each phase began, since the last step that was timed."""

    def __init__(self, now_secs: float) -> None:
        self._begun = deque([(now_secs, SavePhase.QUIET)], maxlen=CHANGES_MAX)

    def note(self, now_secs: float, phase: SavePhase) -> None:
        if phase is not self._begun[-1][1]:
            self._begun.append((now_secs, phase))

    def take(self, start_secs: float, end_secs: float) -> Counter[SavePhase]:
        """Return how long each phase took between two times; forget what was before."""
        ends_secs = [*(secs for secs, _ in self._begun), end_secs][1:]
        phases_secs: Counter[SavePhase] = Counter()
        for (begun_secs, phase), ended_secs in zip(tuple(self._begun), ends_secs, strict=True):
            shared_secs = min(ended_secs, end_secs) - max(begun_secs, start_secs)
            phases_secs[phase] += max(0.0, shared_secs)  # type: ignore[assignment]
            if ended_secs < end_secs:
                self._begun.popleft()
        return phases_secs


@dataclass(slots=True)
class _Seat:
    """What was seen of one trainer.

    Its step was published at `since_secs`; it had waited for `waited_secs` until then.
    """

    first: tuple[int, int] = (NO_STEP, 0)
    step: int = NO_STEP
    since_secs: float = 0.0
    waited_secs: float = 0.0
    has_notice: bool = False


class StepMeter:
    """Writes `first_step`, `preempted` and `progress` of the trainers of one host."""

    def __init__(
        self,
        control: ControlBlock,
        events: EventWriter,
        clock: Clock,
        measures: Measures,
        traffic: Callable[[], tuple[int | None, int]] = lambda: (None, 0),
    ) -> None:
        self._cells = control.cells
        self._measures = measures
        self._traffic = traffic
        """Returns the requests to the durable tier and the bytes pulled from peers so far."""
        self._events = events
        self._clock = clock
        self._seats: dict[int, _Seat] = {}
        self._durations = {phase: _Durations() for phase in SavePhase}
        self._phases = _PhaseTimes(clock.monotonic())
        self._cost = StepCost[str]()
        self._inflation_secs: Counter[str] = Counter()
        """By how much steps were longer since the last record, by phase."""
        self._timed_seat: int | None = None
        self._positions: dict[int, RankPosition] = {}
        self._published_secs: dict[int, float | None] = {}
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
        self._phases.note(self._clock.monotonic(), SavePhase.SEALING)

    def read_progress(self, members: Sequence[TrainerProcess], phase: SavePhase) -> None:
        """Read the cells of the present trainers, and record their progress when it is due."""
        now_secs = self._clock.monotonic()
        self._phases.note(now_secs, phase)
        timed = min(members, key=lambda member: member.rank, default=None)
        for member in members:
            seat = self._look(member)
            if member is timed:
                self._timed_seat = member.seat
                self._time(seat, member, now_secs)
        waited_secs = now_secs - self._recorded_secs
        has_changed = self._positions != self._recorded
        if self._positions and waited_secs >= (PROGRESS_SECS if has_changed else IDLE_SECS):
            self._record(now_secs)

    def accepted_step(self, member: TrainerProcess) -> int | None:
        """Return the newest step of a trainer whose save was accepted; None: there is none."""
        step = self._cells[accepted_cell(member.seat)]
        return step if 0 <= step <= STEP_MAX else None

    def leave(self, member: TrainerProcess) -> tuple[int | None, float]:
        """Read the cells of a trainer that has ended a last time, and forget it.

        Returns:
            Its last step, and for how many seconds saves have blocked it.
        """
        now_secs = self._clock.monotonic()
        seat = self._look(member)
        if member.seat == self._timed_seat:
            self._time(seat, member, now_secs)
        self._seats.pop(member.seat, None)
        if self._positions:
            self._record(now_secs)
        position = self._positions.pop(member.rank, None)
        self._recorded.pop(member.rank, None)
        self._measures.forget_rank(member.rank)
        self._published_secs.pop(member.rank, None)
        return (position.step, position.blocked_secs) if position is not None else (None, 0.0)

    def _look(self, member: TrainerProcess) -> _Seat:
        """Record the first step and the notice of a trainer, and take its position."""
        cells, seat = self._cells, self._seats.setdefault(member.seat, _Seat())
        first, step = self._first(member), cells[step_cell(member.seat)]
        # Trainers write these cells, so their values are bounded here.
        if first != seat.first and 0 <= first[0] <= STEP_MAX and 0 <= first[1] <= TIME_MAX_US:
            seat.first, seat.step = first, NO_STEP
            time = datetime.fromtimestamp(first[1] / 1e6, UTC)
            self._events.write(
                FirstStep(
                    time=time,
                    rank=member.rank,
                    step=first[0],
                    waiting_secs=self._waits(member)[0],
                )
            )
        if 0 <= step <= STEP_MAX:
            position = self._positions.get(member.rank)
            if position is not None and step < position.step:
                # The run goes back: the next record would not show how far it was.
                self._record(self._clock.monotonic())
            blocked_secs = max(0, cells[blocked_cell(member.seat)]) / 1e9
            before, after = self._waits(member)
            self._positions[member.rank] = RankPosition(
                step=step,
                blocked_secs=round(blocked_secs, 4),
                blocked_after_secs=round(blocked_secs - self._blocked_before_secs(member), 4),
                waiting_secs=before,
                waiting_after_secs=after,
            )
            self._measures.note_position(member.rank, self._positions[member.rank])
            self._published_secs[member.rank] = self._step_time_secs(member)
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

    def _step_time_secs(self, member: TrainerProcess) -> float | None:
        """Return when the trainer published its step, by the monotonic clock; None: not known."""
        time_secs = self._cells[step_time_cell(member.seat)] / 1e9
        return time_secs if 0 < time_secs <= self._clock.monotonic() else None

    def _blocked_before_secs(self, member: TrainerProcess) -> float:
        """Return for how long saves had blocked a trainer until its newest step."""
        cells, seat = self._cells, member.seat
        blocked = max(0, cells[blocked_cell(seat)])
        if cells[blocked_step_cell(seat)] == cells[step_cell(seat)]:
            blocked = min(blocked, max(0, cells[blocked_before_cell(seat)]))
        return blocked / 1e9

    def _waits(self, member: TrainerProcess) -> tuple[dict[str, float], dict[str, float]]:
        """Return the waits of a trainer until its newest step, and after it, also one that goes on.

        Waits are in seconds, by reason.
        """
        cells, seat, now_secs = self._cells, member.seat, self._clock.monotonic()
        waits = wait_cells(seat)
        has_waited_after = cells[waits.step] == cells[step_cell(seat)]
        before: dict[str, float] = {}
        after: dict[str, float] = {}
        ended, until = cells[waits.ended].tolist(), cells[waits.before].tolist()
        for index, reason in enumerate(WAIT_REASONS):
            total_secs = ended[index] / 1e9
            until_secs = total_secs
            if has_waited_after:
                until_secs = until[index] / 1e9
                since_secs = cells[waits.since] / 1e9
                if cells[waits.reason] == index and 0 < since_secs <= now_secs:
                    total_secs += now_secs - since_secs
            if 0 < until_secs <= now_secs:
                before[reason] = round(until_secs, 4)
            if 0 < total_secs - until_secs <= now_secs:
                after[reason] = round(total_secs - until_secs, 4)
        return before, after

    def _time(self, seat: _Seat, member: TrainerProcess, now_secs: float) -> None:
        step = self._cells[step_cell(member.seat)]
        if step == seat.step or seat.first[0] == NO_STEP:
            return
        # The time may be that of the step before, if the trainer is publishing this one.
        time_secs = self._step_time_secs(member)
        if time_secs is None or time_secs <= seat.since_secs:
            time_secs = now_secs
        # A restore publishes its step too; a step that follows none is not a duration.
        waited_secs = sum(self._waits(member)[0].values())
        if seat.first[0] <= seat.step < step:
            own_secs = time_secs - seat.since_secs - (waited_secs - seat.waited_secs)
            phases_secs = self._phases.take(seat.since_secs, time_secs)
            self._add_steps(step, step - seat.step, max(0.0, own_secs), phases_secs)
        seat.step, seat.since_secs, seat.waited_secs = step, time_secs, waited_secs

    def _add_steps(
        self, step: int, steps: int, secs: float, phases_secs: Counter[SavePhase]
    ) -> None:
        """Add some steps with the time of each phase; the greatest that counts labels them."""
        writing_secs, sealing_secs = phases_secs[SavePhase.WRITING], phases_secs[SavePhase.SEALING]
        saving_secs = min(secs, writing_secs + sealing_secs)
        is_writing = writing_secs > 0 and is_quiet(secs, sealing_secs)
        phase = SavePhase.WRITING if is_writing else SavePhase.SEALING
        shown = SavePhase.QUIET if is_quiet(secs, saving_secs) else phase
        self._durations[shown].add(steps, secs)
        self._measures.note_steps(shown.name.lower(), step, steps, secs)
        self._cost.add_steps(phase.name.lower(), secs, saving_secs, steps)
        costs_secs = self._cost.take()
        if costs_secs is not None and self._cost.quiet_secs is not None:
            self._inflation_secs.update(costs_secs)
            self._measures.note_inflation(costs_secs, self._cost.quiet_secs)

    def _record(self, now_secs: float) -> None:
        durations = self._durations
        requests, pulled_bytes = self._traffic()
        self._events.write(
            StepProgress(
                ranks={
                    rank: self._aged(rank, position, now_secs)
                    for rank, position in sorted(self._positions.items())
                },
                quiet=durations[SavePhase.QUIET].times(),
                sealing=durations[SavePhase.SEALING].times(),
                writing=durations[SavePhase.WRITING].times(),
                inflation_secs=self._inflation(),
                durable_requests=requests,
                pulled_bytes=pulled_bytes,
            )
        )
        self._durations = {phase: _Durations() for phase in SavePhase}
        self._recorded, self._recorded_secs = dict(self._positions), now_secs

    def _inflation(self) -> dict[str, float] | None:
        """Take by how much steps were longer, if it is known."""
        if self._cost.quiet_secs is None:
            return None
        inflation_secs, self._inflation_secs = self._inflation_secs, Counter()
        return {label: round(secs, 6) for label, secs in inflation_secs.items()}

    def _aged(self, rank: int, position: RankPosition, now_secs: float) -> RankPosition:
        published_secs = self._published_secs.get(rank)
        if published_secs is None:
            return position
        return structs.replace(
            position, step_age_secs=round(max(0.0, now_secs - published_secs), 4)
        )
