"""Report the checkpoints of each tier: how often they reached it, and what they cost."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from holdfast.observe.events.schema import (
    CheckpointCommitted,
    CheckpointEvent,
    CheckpointProtected,
    CheckpointSealed,
    CheckpointUploaded,
    PartSaved,
    StepProgress,
)
from holdfast.observe.reports.division import Piece
from holdfast.observe.reports.model import Intervals, SlowestRank, TierReport
from holdfast.observe.reports.run_clock import Timed

SHOWN_MAX = 500
"""How many intervals and times a tier lists."""


def tier_reports(
    timed: Sequence[Timed], pieces: Sequence[Piece], begin_us: int, *, is_measured: bool = True
) -> dict[str, TierReport]:
    """Return the report of each tier that a checkpoint has reached.

    Args:
        timed: The events.
        pieces: The pieces of the run's time.
        begin_us: When it began.
        is_measured: Whether steps beside checkpoints can be compared with others; else a cost of 0
            is not known.
    """
    parts = [item.event for item in timed if isinstance(item.event, PartSaved)]
    commits = {
        item.event.step_and_attempt: item.event
        for item in timed
        if isinstance(item.event, CheckpointCommitted)
    }
    reached = {
        "ram": [item for item in timed if isinstance(item.event, CheckpointSealed)],
        "peer": [item for item in timed if isinstance(item.event, CheckpointProtected)],
        "durable": [item for item in timed if isinstance(item.event, CheckpointCommitted)],
        "remote": [item for item in timed if isinstance(item.event, CheckpointUploaded)],
    }
    in_ram = [part for part in parts if part.tier == "ram"]
    reached["ram"] = [
        item
        for item in reached["ram"]
        if isinstance(item.event, CheckpointSealed) and item.event.tier == "ram"
    ]
    requests, pulled_bytes = _traffic(timed)
    reports: dict[str, TierReport] = {}
    for name, events in reached.items():
        times_us = _first_times(events)
        if not times_us:
            continue
        count = len(times_us)
        size_bytes: int | None = None
        secs: list[float] = []
        if name == "ram":
            size_bytes, secs = sum(p.bytes for p in in_ram), [p.secs for p in in_ram]
        elif name == "peer":
            size_bytes = pulled_bytes
        elif name == "durable":
            own = [commit.bytes for commit in commits.values() if commit.bytes is not None]
            size_bytes = sum(own) if own else None
            secs = [commit.secs for commit in commits.values() if commit.secs is not None]
            secs = secs or [part.secs for part in parts if part.tier == "durable"]
        elif name == "remote":
            uploads = [o.event for o in events if isinstance(o.event, CheckpointUploaded)]
            size_bytes, secs = sum(item.bytes for item in uploads), [item.secs for item in uploads]
        reports[name] = TierReport(
            checkpoints=count,
            bytes=size_bytes,
            reused_bytes=sum(p.reused_bytes for p in in_ram) if name == "ram" else 0,
            requests=requests if name == "durable" else None,
            intervals=_intervals(times_us),
            cost_secs=_cost_secs(name, pieces, count, "ram" in reports, is_measured),
            secs=statistics.median(secs) if secs else None,
            at_secs=[(us - begin_us) / 1e6 for us in _evenly(sorted(times_us.values()))],
        )
    return reports


def _traffic(timed: Sequence[Timed]) -> tuple[int | None, int | None]:
    """Return the requests to the durable tier and the bytes pulled from peers, of all agents.

    Each agent counts from its start, so that a count that has fallen is of another agent.
    """
    sums: dict[str, int | None] = {"durable_requests": None, "pulled_bytes": None}
    before: dict[tuple[str, str], int] = {}
    for item in timed:
        if not isinstance(item.event, StepProgress):
            continue
        for name in sums:
            value = getattr(item.event, name)
            if value is None:
                continue
            last = before.get((name, item.event.host), 0)
            before[name, item.event.host] = value
            sums[name] = (sums[name] or 0) + (value - last if value >= last else value)
    return sums["durable_requests"], sums["pulled_bytes"]


def slowest_rank(timed: Sequence[Timed]) -> SlowestRank | None:
    """Return the rank whose parts took longest to seal; None if none was sealed."""
    secs: dict[int, list[float]] = defaultdict(list)
    hosts: dict[int, str] = {}
    for item in timed:
        if isinstance(item.event, PartSaved):
            secs[item.event.rank].append(item.event.secs)
            hosts[item.event.rank] = item.event.host
    if not secs:
        return None
    medians = {rank: statistics.median(own) for rank, own in secs.items()}
    rank = max(medians, key=lambda item: (medians[item], -item))
    return SlowestRank(
        rank=rank,
        host=hosts[rank],
        part_secs=round(medians[rank], 6),
        of_all_secs=round(statistics.median(medians.values()), 6),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _first_times(events: Sequence[Timed]) -> dict[tuple[int, int], int]:
    """Return when each checkpoint reached a tier: several hosts report it."""
    times_us: dict[tuple[int, int], int] = {}
    for item in events:
        is_recovery = isinstance(item.event, CheckpointCommitted) and item.event.by == "recovery"
        if isinstance(item.event, CheckpointEvent) and not is_recovery:
            times_us.setdefault(item.event.step_and_attempt, item.time_us)
    return times_us


def _intervals(times_us: dict[tuple[int, int], int]) -> Intervals:
    by_attempt: dict[int, list[int]] = defaultdict(list)
    for (_, attempt), time_us in times_us.items():
        by_attempt[attempt].append(time_us)
    values = [
        (after - before) / 1e6
        for own in by_attempt.values()
        for before, after in pairwise(sorted(own))
    ]
    if not values:
        return Intervals()
    return Intervals(
        count=len(values),
        p50_secs=percentile(values, 0.5),
        p95_secs=percentile(values, 0.95),
        max_secs=max(values),
        values_secs=[float(value) for value in _evenly(values)],
    )


def _cost_secs(
    tier: str, pieces: Sequence[Piece], count: int, has_ram: bool, is_measured: bool
) -> float | None:
    """Return by how much one checkpoint of a tier lengthened the steps; None: not known.

    Blocked time and the steps during which a checkpoint was taken belong to RAM, or to the durable
    tier if that takes them alone; the steps during which one was written belong to the durable one.
    """
    sealing_us = sum(piece.sealing_us for piece in pieces)
    writing_us = sum(piece.writing_us for piece in pieces)
    if tier == "ram":
        cost_us = sealing_us
    elif tier == "durable":
        cost_us = writing_us + (0 if has_ram else sealing_us)
    else:
        return None
    return cost_us / 1e6 / count if cost_us or is_measured else None


def _evenly(values: Sequence[float]) -> list[float]:
    """Return at most `SHOWN_MAX` values, evenly chosen."""
    if len(values) <= SHOWN_MAX:
        return list(values)
    return [values[index * len(values) // SHOWN_MAX] for index in range(SHOWN_MAX)]
