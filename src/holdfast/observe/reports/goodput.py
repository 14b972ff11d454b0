"""Report where the time of a run went: a pure function of its events.

Bad input is no reason to fail: what cannot be used is left out, and `RunReport.notes` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from holdfast.observe.events.reader import Omission
from holdfast.observe.events.schema import (
    CommandEnded,
    Event,
    EventsLost,
    ManagerOpened,
    StateRestored,
)
from holdfast.observe.reports.division import Piece, divide, quiet_step_us
from holdfast.observe.reports.model import (
    RESTART_PARTS,
    AttemptReport,
    CommandEnd,
    Micros,
    RunFailure,
    RunReport,
    Slice,
    in_secs,
)
from holdfast.observe.reports.run_clock import on_one_axis, wall_time
from holdfast.observe.reports.tiers import slowest_rank, tier_reports
from holdfast.observe.reports.traces import Trace, gather_traces
from holdfast.policy.step_cost import QUIET_COUNT_MIN

SLICES_MAX = 1000
"""How many pieces the timeline has at most; neighbours of one attempt are merged."""
OMISSIONS_MAX = 20
CLOSED_ENDS = ("closed", "open")
"""Ends that are failures only if steps were lost."""


def report_run(run: str, items: Iterable[Event | Omission]) -> RunReport:
    """Return the report of a run.

    Args:
        run: Its name in the report.
        items: What `EventReader.read` yields.
    """
    events: list[Event] = []
    omissions: list[Omission] = []
    for item in items:
        if isinstance(item, Event):
            events.append(item)
        else:
            omissions.append(item)
    timed, clock_notes = on_one_axis(events)
    traces, overlap_notes = gather_traces(timed)
    pieces = divide(traces)
    begin_us = pieces[0].start_us if pieces else 0
    wall_us = pieces[-1].end_us - begin_us if pieces else 0
    total, restart, waiting = _sums(pieces)
    reached = [trace.last_step for trace in traces if trace.last_step is not None]
    first = min((mark.step for trace in traces for mark in trace.marks), default=0)
    notes = [*clock_notes, *overlap_notes, *_omission_notes(omissions), *_lost_notes(events)]
    notes += _trace_notes(traces)
    return RunReport(
        run=run,
        started=wall_time(begin_us) if pieces else None,
        wall_secs=wall_us / 1e6,
        categories=in_secs(total),
        restart=in_secs(restart, RESTART_PARTS),
        goodput=round(total["productive"] / wall_us, 6) if wall_us else None,
        attempts=[_attempt(trace, pieces, begin_us) for trace in traces],
        failures=_failures(traces, begin_us),
        ends=[command_end(event) for event in events if isinstance(event, CommandEnded)],
        tiers=tier_reports(timed, pieces, begin_us, is_measured=_is_measured(traces)),
        slowest_rank=slowest_rank(timed),
        waiting=in_secs(waiting, tuple(waiting)),
        steps=max(reached, default=first - 1) - first + 1,
        timeline=[_slice(piece, begin_us) for piece in _merged(pieces)],
        notes=notes,
    )


def command_end(event: CommandEnded) -> CommandEnd:
    """Return an end that `holdfast run` has recorded."""
    return CommandEnd(
        time=event.time,
        host=event.host,
        attempt=event.run_attempt,
        cause=event.cause,
        code=event.code,
        reason=event.reason,
        restarts=event.restarts,
        restart_in_secs=event.restart_in_secs,
        stopped_because=event.stopped_because,
        stacks=event.stacks,
    )


def _is_measured(traces: Sequence[Trace]) -> bool:
    """Return whether steps beside checkpoints were compared with quiet ones."""
    return any(mark.inflation_us is not None for trace in traces for mark in trace.marks)


def _sums(pieces: Iterable[Piece]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    total: Counter[str] = Counter()
    restart: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for piece in pieces:
        total.update(piece.amounts)
        restart.update(piece.restart)
        waiting.update(piece.waiting)
    return total, restart, waiting


def _attempt(trace: Trace, pieces: Sequence[Piece], begin_us: int) -> AttemptReport:
    own = [piece for piece in pieces if piece.attempt == trace.number]
    total, restart, _ = _sums(own)
    start_us = own[0].start_us if own else trace.last_us
    quiet_us = quiet_step_us(trace)
    opened = trace.opened.event if trace.opened is not None else None
    assert opened is None or isinstance(opened, ManagerOpened)
    return AttemptReport(
        attempt=trace.number,
        host=trace.host,
        start_secs=(start_us - begin_us) / 1e6,
        wall_secs=sum(piece.end_us - piece.start_us for piece in own) / 1e6,
        categories=in_secs(total),
        restart=in_secs(restart, RESTART_PARTS),
        first_step=trace.marks[0].step if trace.marks else None,
        last_step=trace.last_step,
        quiet_step_secs=None if quiet_us is None else round(quiet_us / 1e6, 6),
        end=trace.end,
        launchers=opened.launchers if opened is not None else (),
        restarts=opened.restarts if opened is not None else {},
    )


def _failures(traces: Sequence[Trace], begin_us: int) -> list[RunFailure]:
    """Return the ends of attempts that were failures, or that lost steps."""
    failures = []
    high: int | None = None
    """The last step that was finished and not lost."""
    first = min((mark.step for trace in traces for mark in trace.marks), default=0)
    for index, trace in enumerate(traces):
        if trace.last_step is not None:
            high = trace.last_step
        if trace.ended_us is None:
            continue
        later = traces[index + 1 :]
        following = next((later_trace for later_trace in later if later_trace.marks), None)
        lost, last_step = None, high
        if following is not None:
            kept = _kept_step(later[0], following, first)
            lost = max(0, high - kept) if high is not None else 0
            high = None if high is None else min(high, kept)
        if trace.end in CLOSED_ENDS and not lost:
            continue
        next_us = following.marks[0].time_us if following is not None else None
        sources = _sources(following)
        failures.append(
            RunFailure(
                time=wall_time(trace.ended_us),
                at_secs=(trace.ended_us - begin_us) / 1e6,
                attempt=trace.number,
                cause=trace.end,
                host=trace.end_host,
                last_step=last_step,
                steps_lost=lost,
                secs_to_next_step=(
                    None if next_us is None else max(0, next_us - trace.ended_us) / 1e6
                ),
                source=max(sources, key=lambda tier: sources[tier]) if sources else None,
                sources=sources,
            )
        )
    return failures


def _kept_step(successor: Trace, following: Trace, first: int) -> int:
    """Return the last step that the end of an attempt has left.

    Args:
        successor: The next attempt.
        following: The next one that has finished a step; it may be the same.
        first: The first step of the run.
    """
    kept = following.marks[0].step - 1
    if successor is following or not successor.has_origin:
        return kept
    # It went back itself, or ended before its first step: that loss is its own. Survivors of a lost
    # rank may have saved a later step in it.
    return max(kept, first - 1 if successor.origin_step is None else successor.origin_step)


def _sources(trace: Trace | None) -> dict[str, int]:
    """Return the bytes that all ranks of an attempt read at its start, by tier."""
    sizes_bytes: Counter[str] = Counter()
    for timed in trace.restored if trace is not None else ():
        is_start = trace is not None and timed.time_us <= trace.marks[0].time_us
        if isinstance(timed.event, StateRestored) and is_start:
            sizes_bytes.update({tier: size for tier, size in timed.event.sources.items() if size})
    return dict(sizes_bytes)


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge neighbours of one attempt until there are few enough."""
    merged = list(pieces)
    length_us = 1_000_000
    while len(merged) > SLICES_MAX:
        shorter: list[Piece] = []
        for piece in merged:
            last = shorter[-1] if shorter else None
            if (
                last is not None
                and last.attempt == piece.attempt
                and piece.end_us - last.start_us <= length_us
            ):
                shorter[-1] = _joined(last, piece)
            else:
                shorter.append(piece)
        merged, length_us = shorter, length_us * 2
        if length_us > 1 << 62:
            break
    return merged


def _joined(first: Piece, second: Piece) -> Piece:
    amounts: Micros = dict(Counter(first.amounts) + Counter(second.amounts))
    return Piece(
        start_us=first.start_us,
        end_us=second.end_us,
        attempt=first.attempt,
        steps=first.steps + second.steps,
        amounts=amounts,
    )


def _slice(piece: Piece, begin_us: int) -> Slice:
    return Slice(
        start_secs=(piece.start_us - begin_us) / 1e6,
        secs=(piece.end_us - piece.start_us) / 1e6,
        attempt=piece.attempt,
        steps=piece.steps,
        categories={name: micros / 1e6 for name, micros in piece.amounts.items()},
    )


def _omission_notes(omissions: Sequence[Omission]) -> list[str]:
    notes = [
        f"left out: {omission.where}: {omission.reason}" for omission in omissions[:OMISSIONS_MAX]
    ]
    if len(omissions) > OMISSIONS_MAX:
        notes.append(f"left out: {len(omissions) - OMISSIONS_MAX} more places like these")
    return notes


def _lost_notes(events: Iterable[Event]) -> list[str]:
    return [
        f"{event.count} events of host {event.host} were not written: {event.reason}"
        for event in events
        if isinstance(event, EventsLost)
    ]


def _trace_notes(traces: Sequence[Trace]) -> list[str]:
    notes = []
    for trace in traces:
        if trace.last_step is None:
            notes.append(f"attempt {trace.number} finished no step")
        elif not trace.marks:
            notes.append(
                f"attempt {trace.number} saved step {trace.last_step}; the times of its steps are "
                "not known"
            )
        elif not _is_measured([trace]) and any(mark.beside_count for mark in trace.marks):
            notes.append(
                f"attempt {trace.number} had fewer than {QUIET_COUNT_MIN} steps without a save: "
                "the inflation of its other steps was not measured and is counted as productive"
            )
        if trace.end == "unseen" and trace.last_step is not None:
            notes.append(
                f"no agent saw the end of attempt {trace.number}: whether it finished steps after "
                f"step {trace.last_step} is not known, and they are not counted as lost"
            )
    numbers_seen = [0, *(trace.number for trace in traces)]
    for number, successor in pairwise(numbers_seen):
        missing = range(number + 1, successor)
        if missing:
            first, last = missing[0], missing[-1]
            which = f"attempt {first}" if first == last else f"attempts {first} to {last}"
            notes.append(f"there are no events of {which}")
    return notes
