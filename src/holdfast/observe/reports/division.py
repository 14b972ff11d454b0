"""Divide the time of a run into categories that add up to it exactly.

The time is cut at the known positions of the timed rank: each piece begins where the one before
ended. Within a piece, what was measured is taken first (blocked, waiting), then the inflation, and
the remainder belongs to the steps. Everything is in whole microseconds, so nothing is lost by
rounding.

- `productive`: steps that were made for the first time.
- `redone`: steps with a number that an earlier attempt, or the same one, had reached already.
- `restart`: from the last step before an end to the first step after it, without that step's own
  duration; also the start of the run.
- `blocked`: `save`, `finish` and `close` blocked the training thread.
- `inflation`: steps during a save or a write were longer than quiet ones (`policy.step_cost`).
- `waiting`: the training reported that it waited.
- `compiling`: the framework reported that it compiled, also before the first step.
- `unknown`: no event explains it: after the last step of the run, and steps that took more than
  twice as long as the median of quiet ones allows.

See docs/decisions/0045.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.observe.events.schema import COMPILATION, ManagerOpened, StateRestored
from holdfast.observe.reports.model import Micros
from holdfast.observe.reports.traces import StepMark, Trace
from holdfast.policy.step_cost import QUIET_COUNT_MIN

UNEXPLAINED_FACTOR = 2.0
"""How many median steps a step may last, on average over a piece, before time is `unknown`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of the run's time.

    Attributes:
        start_us, end_us: Its ends.
        attempt: The attempt.
        steps: The steps finished in it.
        amounts: Its length by category.
        restart: Its category `restart` by part.
        waiting: Its category `waiting` by reason.
        sealing_us, writing_us: By how much saves and writes lengthened its steps.
    """

    start_us: int
    end_us: int
    attempt: int
    steps: int = 0
    amounts: Micros
    restart: Micros = field(default_factory=dict)
    waiting: Micros = field(default_factory=dict)
    sealing_us: int = 0
    writing_us: int = 0


@dataclass(slots=True)
class _Room:
    """The time of a piece that is not assigned yet."""

    left_us: int
    amounts: Counter[str] = field(default_factory=Counter)

    def take(self, category: str, wanted_us: float) -> int:
        """Assign time to a category, as far as there is any; return how much."""
        taken_us = min(self.left_us, max(0, round(wanted_us)))
        self.left_us -= taken_us
        self.amounts[category] += taken_us
        return taken_us

    def rest(self, category: str) -> int:
        """Assign all that is left."""
        return self.take(category, self.left_us)


def divide(traces: Sequence[Trace]) -> list[Piece]:
    """Return the pieces of a run, from the start of its first process to its last event."""
    if not traces:
        return []
    division = _Division(_begin_us(traces[0]))
    for trace, successor in zip(traces, [*traces[1:], None], strict=True):
        division.add_trace(trace, successor)
    return division.pieces


def quiet_step_us(trace: Trace) -> float | None:
    """Return the median duration of a step without a save; None if there was none."""
    samples_us: list[float] = []
    for mark in trace.marks:
        # The weight of a mark is bounded, and so is the number of samples.
        samples_us += [mark.quiet.median_secs * 1e6] * min(mark.quiet.steps, 64)
    return statistics.median(samples_us) if samples_us else None


def _begin_us(trace: Trace) -> int:
    begin_us = _process_us(trace)
    times_us = [time_us for time_us in (begin_us, trace.started_us) if time_us is not None]
    times_us += [mark.time_us for mark in trace.marks[:1]]
    return min(times_us, default=trace.last_us)


def _process_us(trace: Trace) -> int | None:
    """Return when the timed rank's process began."""
    if trace.opened is None or not isinstance(trace.opened.event, ManagerOpened):
        return None
    event = trace.opened.event
    return trace.opened.time_us - round((event.secs + event.process_secs) * 1e6)


class _Division:
    """The pieces so far; `_cursor_us` is where the next one begins."""

    def __init__(self, begin_us: int) -> None:
        self.pieces: list[Piece] = []
        self._cursor_us = begin_us
        self._high = -1
        """The highest step that was finished."""
        self._waited: Micros = {}
        """The waits that the last counted mark of this manager contains."""
        self._blocked_us = 0

    def add_trace(self, trace: Trace, successor: Trace | None) -> None:
        """Add the pieces of one attempt, up to its end."""
        if not trace.is_branch:
            self._waited, self._blocked_us = {}, 0
        quiet_us = quiet_step_us(trace)
        scale = _inflation_scale(trace)
        last: StepMark | None = None
        for mark in trace.marks:
            if mark.is_first:
                self._add_start(trace, mark, quiet_us)
            elif last is not None and mark.step > last.step:
                self._add_steps(trace, (last, mark), quiet_us, scale)
            if mark.step != (last.step if last else None) or mark.is_first:
                last = mark
        if trace.last_step is not None:
            self._high = max(self._high, trace.last_step)
        self._add_tail(trace, successor)

    def _add_start(self, trace: Trace, mark: StepMark, quiet_us: float | None) -> None:
        """Add the time until a first step."""
        room = _Room(max(0, mark.time_us - self._cursor_us))
        waiting = self._wait(room, mark)
        own = "redone" if mark.step <= self._high else "productive"
        room.take(own, quiet_us or 0)
        parts = self._restart_parts(trace, mark, room.left_us)
        room.rest("restart")
        self._high = max(self._high, mark.step)
        self._append(trace, mark.time_us, room, steps=1, restart=parts, waiting=waiting)

    def _restart_parts(self, trace: Trace, mark: StepMark, length_us: int) -> Micros:
        """Divide the time before a first step by what the processes did."""
        room = _Room(length_us)
        restored = sum(
            round(timed.event.secs * 1e6)
            for timed in trace.restored
            if isinstance(timed.event, StateRestored)
            and (timed.event.host, timed.event.rank) == (trace.host, trace.rank)
            and self._cursor_us <= timed.time_us <= mark.time_us
        )
        begun_us = _process_us(trace)
        is_opening = begun_us is not None and trace.opened is not None
        if is_opening and trace.opened is not None and trace.opened.time_us >= self._cursor_us:
            event = trace.opened.event
            assert isinstance(event, ManagerOpened)
            room.take("down", (begun_us or 0) - self._cursor_us)
            room.take("startup", event.process_secs * 1e6)
            room.take("opening", event.secs * 1e6)
        room.take("restore", restored)
        room.rest("first_step")
        return dict(room.amounts)

    def _add_steps(
        self, trace: Trace, marks: tuple[StepMark, StepMark], quiet_us: float | None, scale: float
    ) -> None:
        """Add the time of some steps."""
        before, mark = marks
        steps = mark.step - before.step
        room = _Room(max(0, mark.time_us - self._cursor_us))
        waiting = self._wait(room, mark)
        blocked_us = room.take("blocked", self._blocked_since(mark))
        sealing_us, writing_us = _inflation_us(mark)
        inflation_us = max(0.0, max(0.0, sealing_us - blocked_us) + writing_us) * scale
        room.take("inflation", inflation_us)
        own_us = steps * (_own_median(mark, quiet_us) or 0.0)
        if own_us and room.left_us > UNEXPLAINED_FACTOR * own_us:
            room.take("unknown", room.left_us - own_us)
        redone = min(steps, max(0, self._high - before.step))
        room.take("redone", room.left_us * redone / steps)
        room.rest("productive")
        self._high = max(self._high, mark.step)
        self._append(
            trace,
            mark.time_us,
            room,
            steps=steps,
            waiting=waiting,
            sealing_us=round(max(blocked_us, sealing_us * scale)),
            writing_us=round(max(0.0, writing_us * scale)),
        )

    def _add_tail(self, trace: Trace, successor: Trace | None) -> None:
        """Add the time from the last step to the end of the attempt."""
        end_us = trace.ended_us if trace.end not in ("open", "closed") else trace.last_us
        if trace.end == "closed" and trace.ended_us is not None:
            end_us = trace.ended_us
        room = _Room(max(0, (end_us or self._cursor_us) - self._cursor_us))
        waiting: Micros = {}
        if trace.marks:
            waiting = _take_waits(room, trace.marks[-1].waiting_after_us)
            room.take("blocked", trace.marks[-1].blocked_after_us)
        is_restart = successor is not None or not trace.marks
        parts = {"down": room.left_us} if is_restart else {}
        room.rest("restart" if is_restart else "unknown")
        self._append(trace, end_us or self._cursor_us, room, restart=parts, waiting=waiting)

    def _wait(self, room: _Room, mark: StepMark) -> Micros:
        """Assign the waits since the last counted mark; return the reported ones by reason."""
        waits: Micros = {}
        for reason, total_us in mark.waiting_us.items():
            earlier_us = self._waited.get(reason, 0)
            waits[reason] = total_us - earlier_us
            self._waited[reason] = max(total_us, earlier_us)
        return _take_waits(room, waits)

    def _blocked_since(self, mark: StepMark) -> int:
        blocked_us = mark.blocked_us - self._blocked_us
        self._blocked_us = max(mark.blocked_us, self._blocked_us)
        return max(0, blocked_us)

    def _append(self, trace: Trace, end_us: int, room: _Room, **members: object) -> None:
        if end_us <= self._cursor_us:
            return
        amounts = {name: micros for name, micros in room.amounts.items() if micros}
        self.pieces.append(
            Piece(
                start_us=self._cursor_us,
                end_us=end_us,
                attempt=trace.number,
                amounts=amounts,
                **members,  # type: ignore[arg-type]
            )
        )
        self._cursor_us = end_us


def _take_waits(room: _Room, waits: Micros) -> Micros:
    """Assign waits; return those that the training has reported, by reason."""
    room.take("compiling", waits.get(COMPILATION, 0))
    return {
        reason: room.take("waiting", us) for reason, us in waits.items() if reason != COMPILATION
    }


def _own_median(mark: StepMark, quiet_us: float | None) -> float | None:
    if mark.quiet.steps >= QUIET_COUNT_MIN:
        return mark.quiet.median_secs * 1e6
    return quiet_us


def _inflation_us(mark: StepMark) -> tuple[int, int]:
    """Return by how much saves and writes lengthened steps; either may be negative."""
    inflation_us = mark.inflation_us or {}
    return inflation_us.get("sealing", 0), inflation_us.get("writing", 0)


def _inflation_scale(trace: Trace) -> float:
    """Return by what to multiply each piece's inflation, so that noise cancels over the attempt.

    Steps differ by chance in both directions. Pieces without inflation count as zero, so the others
    would add up to too much.
    """
    both_us = [sum(_inflation_us(mark)) for mark in trace.marks]
    positive_us = sum(us for us in both_us if us > 0)
    return max(0, sum(both_us)) / positive_us if positive_us else 0.0
