"""Gather from a run's events what each attempt did, as its lowest rank saw it.

The ranks of a job step together, so one rank's steps divide the time of all of them. What an
attempt wrote after its successor had begun is left out, with a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from holdfast.observe.attempt_ends import EndOfAttempt
from holdfast.observe.events.schema import (
    AttemptBranched,
    AttemptFenced,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointSealed,
    FirstStep,
    LeaderReplaced,
    ManagerOpened,
    PartSaved,
    PeerHeard,
    PeerSilent,
    PreemptionNoticed,
    RanksLost,
    StateRestored,
    StepProgress,
    StepTimes,
    TrainerLeft,
    TrainerLost,
)
from holdfast.observe.reports.run_clock import Timed

OF_TRAINERS = (
    AttemptStarted,
    AttemptBranched,
    ManagerOpened,
    FirstStep,
    StepProgress,
    StateRestored,
    PreemptionNoticed,
    TrainerLeft,
    TrainerLost,
    RanksLost,
)
"""The events that show that an attempt was alive."""
OF_ENDS = (AttemptFenced, PeerSilent, PeerHeard, LeaderReplaced)
"""Further events that show how it ended."""
OF_SAVES = (PartSaved, CheckpointSealed, CheckpointCommitted)
"""The events that show that an attempt has finished a step, the one that was saved."""
NO_STEPS = StepTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """A known position of the timed rank.

    Attributes:
        time_us: When the step was finished.
        step: The step.
        is_first: It is the first one after opening or resuming.
        blocked_us: For how long saves had blocked the training until the step, since the manager
            was opened.
        blocked_after_us: For how long after it, as far as is known.
        waiting_us: How long the training had waited until the step, by reason.
        waiting_after_us: How long it has waited after it, as far as is known.
        quiet: The steps since the last mark beside which nothing was saved.
        beside_count: How many others there were.
        inflation_us: By how much those were longer, by what was under way; None: not known.
    """

    time_us: int
    step: int
    is_first: bool = False
    blocked_us: int = 0
    blocked_after_us: int = 0
    waiting_us: dict[str, int] = field(default_factory=dict)
    waiting_after_us: dict[str, int] = field(default_factory=dict)
    quiet: StepTimes = NO_STEPS
    beside_count: int = 0
    inflation_us: dict[str, int] | None = None


@dataclass(slots=True, kw_only=True)
class Trace:
    """What is known of one attempt.

    Attributes:
        number: Its number.
        rank: The rank that is timed.
        host: The host of that rank.
        started_us: When the attempt had begun.
        is_branch: The same processes began it, from an older checkpoint.
        has_origin: Whether it is known from which checkpoint it continues.
        origin_step: The step of that checkpoint; None: it began anew.
        opened: The opening of the timed rank's manager.
        restored: What the ranks restored.
        marks: The positions of the timed rank, in the order of time.
        last_step: The last step of any rank.
        end: As in `AttemptReport`.
        end_host: The host on which it ended first.
        ended_us: When that was noticed.
        last_us: The last sign of a trainer.
    """

    number: int
    rank: int = 0
    host: str = ""
    started_us: int | None = None
    is_branch: bool = False
    has_origin: bool = False
    origin_step: int | None = None
    opened: Timed | None = None
    restored: list[Timed] = field(default_factory=list)
    marks: list[StepMark] = field(default_factory=list)
    last_step: int | None = None
    end: str = "open"
    end_host: str = ""
    ended_us: int | None = None
    last_us: int = 0


def gather_traces(timed: Sequence[Timed]) -> tuple[list[Trace], list[str]]:
    """Return the attempts in their order, and a line for what was left out."""
    notes: list[str] = []
    by_attempt: dict[int, list[Timed]] = {}
    for item in timed:
        if item.event.run_attempt > 0 and isinstance(item.event, (*OF_TRAINERS, *OF_ENDS)):
            by_attempt.setdefault(item.event.run_attempt, []).append(item)
    traces = []
    numbers = sorted(by_attempt)
    for number, successor in zip_longest(numbers, numbers[1:]):
        own = by_attempt[number]
        if successor is not None:
            begun_us = _begun_us(by_attempt[successor])
            late = [item for item in own if isinstance(item.event, StepProgress | FirstStep)]
            late = [item for item in late if item.time_us > begun_us]
            if late:
                secs = (late[-1].time_us - begun_us) / 1e6
                notes.append(
                    f"attempt {number} went on for {secs:.0f} s after attempt {successor} had "
                    "begun; what it did then is left out"
                )
            own = [item for item in own if item not in late] if late else own
        if own:
            traces.append(_trace(number, own))
    _note_saved_steps(traces, timed)
    _set_ends(traces, by_attempt)
    return traces, notes


def _note_saved_steps(traces: Sequence[Trace], timed: Sequence[Timed]) -> None:
    """Note the steps that saves prove, also where no agent was left to report the last step.

    A part that was saved after the successor had begun is of an attempt that should have ended; a
    commit may be made for an attempt after its end.
    """
    by_number = {trace.number: trace for trace in traces}
    until_us = {
        trace.number: successor.started_us
        for trace, successor in pairwise(traces)
        if successor.started_us is not None
    }
    for item in timed:
        event = item.event
        if not isinstance(event, OF_SAVES) or event.attempt not in by_number:
            continue
        end_us = until_us.get(event.attempt)
        is_late = end_us is not None and item.time_us > end_us
        if isinstance(event, CheckpointCommitted) or not is_late:
            _note_step(by_number[event.attempt], event.step)


def _begun_us(events: Sequence[Timed]) -> int:
    starts = [item for item in events if isinstance(item.event, AttemptStarted | AttemptBranched)]
    return (starts or events)[0].time_us


def _trace(number: int, events: Sequence[Timed]) -> Trace:
    trace = Trace(number=number)
    trace.rank, trace.host = _timed_rank(events)
    for item in events:
        event = item.event
        is_timed = event.host == trace.host and getattr(event, "rank", None) == trace.rank
        if isinstance(event, AttemptStarted | AttemptBranched):
            if trace.started_us is None:
                trace.started_us = item.time_us
            trace.is_branch = isinstance(event, AttemptBranched)
            trace.has_origin, trace.origin_step = True, event.origin_step
        elif isinstance(event, ManagerOpened) and is_timed:
            trace.opened = item
        elif isinstance(event, StateRestored):
            trace.restored.append(item)
        elif isinstance(event, FirstStep):
            _note_step(trace, event.step)
            if is_timed:
                trace.marks.append(_first_mark(trace, item.time_us, event))
        elif isinstance(event, StepProgress):
            # A position without a first step is the one that a restore has published.
            if trace.marks:
                for position in event.ranks.values():
                    _note_step(trace, position.step)
            if event.host == trace.host and trace.marks:
                _add_mark(trace, item.time_us, event)
        elif isinstance(event, TrainerLost | TrainerLeft) and trace.marks:
            _note_step(trace, event.last_step)
        if isinstance(event, OF_TRAINERS):
            trace.last_us = max(trace.last_us, item.time_us)
    return trace


def _timed_rank(events: Sequence[Timed]) -> tuple[int, str]:
    """Return the lowest rank of the attempt, and its host."""
    seats: set[tuple[int, str]] = set()
    for item in events:
        event = item.event
        if isinstance(event, FirstStep | ManagerOpened):
            seats.add((event.rank, event.host))
        elif isinstance(event, StepProgress):
            seats |= {(rank, event.host) for rank in event.ranks}
    return min(seats, default=(0, events[0].event.host))


def _note_step(trace: Trace, step: int | None) -> None:
    if step is not None and (trace.last_step is None or step > trace.last_step):
        trace.last_step = step


def _micros(secs: float) -> int:
    return round(secs * 1e6)


def _all_micros(by_reason: dict[str, float]) -> dict[str, int]:
    return {reason: _micros(secs) for reason, secs in by_reason.items()}


def _first_mark(trace: Trace, time_us: int, event: FirstStep) -> StepMark:
    blocked_us = trace.marks[-1].blocked_us if trace.marks else 0
    return StepMark(
        time_us=time_us,
        step=event.step,
        is_first=True,
        blocked_us=blocked_us,
        waiting_us=_all_micros(event.waiting_secs),
    )


def _add_mark(trace: Trace, time_us: int, event: StepProgress) -> None:
    position, last = event.ranks.get(trace.rank), trace.marks[-1]
    if position is None or position.step < last.step:
        return
    if position.step_age_secs is not None:
        time_us -= _micros(position.step_age_secs)
    inflation_secs = event.inflation_secs
    trace.marks.append(
        StepMark(
            time_us=max(last.time_us, time_us) if position.step > last.step else last.time_us,
            step=position.step,
            blocked_us=_micros(max(0.0, position.blocked_secs - position.blocked_after_secs)),
            blocked_after_us=_micros(position.blocked_after_secs),
            waiting_us=_all_micros(position.waiting_secs),
            waiting_after_us=_all_micros(position.waiting_after_secs),
            quiet=event.quiet,
            beside_count=event.sealing.steps + event.writing.steps,
            inflation_us=None if inflation_secs is None else _all_micros(inflation_secs),
        )
    )


def _set_ends(traces: Sequence[Trace], by_attempt: dict[int, list[Timed]]) -> None:
    for trace, successor in zip_longest(traces, traces[1:]):
        fold = EndOfAttempt(sees_all=True)
        for timed in by_attempt[trace.number]:
            fold.note_event(timed.event, timed.time_us)
        end = fold.end()
        if end is not None:
            trace.end, trace.ended_us, trace.end_host = end.cause, end.time_us, end.host
        elif successor is not None:
            trace.end = "went_back" if successor.is_branch else "unseen"
            trace.ended_us, trace.end_host = trace.last_us, trace.host
            if successor.is_branch and successor.started_us is not None:
                trace.ended_us = successor.started_us
        if trace.end == "fenced" and trace.ended_us is not None:
            # It is noticed after the successor has begun, whose time that is.
            begun_us = successor.started_us if successor is not None else None
            trace.ended_us = min(trace.ended_us, trace.last_us, begun_us or trace.last_us)
