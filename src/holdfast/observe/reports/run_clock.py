"""Order the events of a run's hosts on one axis of time that no host's clock can set back.

Within one start of a host, distances are those of its monotonic clock. Different hosts, and
different starts of one host, are placed by their wall clocks, each by the median difference of its
two clocks. So a clock that jumps moves no duration of the host, and is reported.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from holdfast.observe.events.schema import Event, FirstStep

JUMP_SECS = 2.0
"""Clocks are disciplined by less than this; a greater change was set."""
NOTICED_SECS = 60.0
"""How long after it an agent may notice a trainer's first step."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Timed:
    """An event, and when it happened on the run's axis, in microseconds since 1970."""

    time_us: int
    event: Event


def wall_us(time: datetime) -> int:
    """Return a time in microseconds since 1970."""
    return (time - _EPOCH) // _MICROSECOND


def wall_time(time_us: int) -> datetime:
    """Return the time that is `time_us` microseconds after 1970."""
    return _EPOCH + timedelta(microseconds=time_us)


def on_one_axis(events: Sequence[Event]) -> tuple[list[Timed], list[str]]:
    """Place events on the run's axis.

    Args:
        events: those of a series of a host are in the order of writing.

    Returns:
        The events in the order of that axis, and a line for each clock that was set.
    """
    timed: list[Timed] = []
    notes: list[str] = []
    for boot in _boots(events):
        offsets = [_offset_us(event) for event in boot if not isinstance(event, FirstStep)]
        if not offsets:
            offsets = [_offset_us(event) for event in boot]
        offset_us = int(statistics.median_low(offsets))
        timed += [Timed(_time_us(event, offset_us), event) for event in boot]
        notes += _jumps(boot[0].host, offsets)
    timed.sort(key=lambda item: item.time_us)
    return timed, notes


def _boots(events: Sequence[Event]) -> list[list[Event]]:
    """Divide events by host and by start of the host, where the monotonic clock begins again."""
    boots: list[list[Event]] = []
    newest: dict[tuple[str, bool], tuple[float, int]] = {}
    by_count: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        series = event.host, event.is_of_saves
        last_secs, count = newest.get(series, (0.0, 0))
        if event.uptime_secs < last_secs - JUMP_SECS:
            count += 1
        newest[series] = event.uptime_secs, count
        if not by_count[event.host, count]:
            boots.append(by_count[event.host, count])
        by_count[event.host, count].append(event)
    return boots


def _offset_us(event: Event) -> int:
    return wall_us(event.time) - round(event.uptime_secs * 1e6)


def _time_us(event: Event, offset_us: int) -> int:
    written_us = round(event.uptime_secs * 1e6) + offset_us
    if isinstance(event, FirstStep):
        # The trainer's own time, which is before the agent has noticed it.
        early_us = written_us - wall_us(event.time)
        if 0 <= early_us <= NOTICED_SECS * 1e6:
            return wall_us(event.time)
    return written_us


def _jumps(host: str, offsets_us: Sequence[int]) -> list[str]:
    notes = []
    reference_us = offsets_us[0]
    for offset_us in offsets_us:
        secs = (offset_us - reference_us) / 1e6
        if abs(secs) > JUMP_SECS:
            how = "forward" if secs > 0 else "back"
            notes.append(
                f"the clock of host {host} was set {how} by {abs(secs):.0f} s; durations on this "
                "host are those of its monotonic clock"
            )
            reference_us = offset_us
    return notes
