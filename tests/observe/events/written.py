"""Events that tests write with the writer itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from holdfast.observe.events.schema import Event
from holdfast.observe.events.writer import EventWriter
from holdfast.store.run_directory import RunDirectory
from tests.trust.in_process import StepClock


def at(secs: float) -> datetime:
    """A time."""
    return datetime(2026, 8, 1, 12, tzinfo=UTC) + timedelta(seconds=secs)


def written(run: Path, *events: Event, host: str = "a", attempt: int = 1) -> None:
    """Writes the events of a host, as its agent does."""
    writer = EventWriter(RunDirectory(run), host, StepClock())
    writer.attempt = attempt
    for event in events:
        writer.write(event)
    writer.close()
