"""Measure one agent's run by the events that the agent writes."""

from __future__ import annotations

from holdfast.clock import Clock
from holdfast.observe.events.schema import CheckpointCommitted, Event, PartSaved
from holdfast.observe.failure_history import FailureHistory
from holdfast.observe.metrics.measures import Measures


class SaveTimes:
    """How long the last save took.

    Attributes:
        sealing_secs: how long a rank here took to seal its last part; None before the first.
        durable_secs: how long the last checkpoint took from its parts in RAM to its commit.
        durable_at_secs: the monotonic time at which the checkpoint under way will be durable, if it
            takes as long as the last one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.sealing_secs: float | None = None
        self.durable_secs: float | None = None
        self.durable_at_secs: float | None = None

    def begin_write(self) -> None:
        """Note that parts of a checkpoint begin to be written to the durable tier."""
        if self.durable_secs is not None:
            self.durable_at_secs = self._clock.monotonic() + self.durable_secs

    def note_event(self, event: Event) -> None:
        """Take the duration of a save that has ended."""
        match event:
            case PartSaved():
                self.sealing_secs = event.secs
            case CheckpointCommitted() if event.secs is not None:
                self.durable_secs = event.secs


class Metering:
    """The measures of one agent, its failures, and the durations of its saves."""

    def __init__(self, clock: Clock) -> None:
        self.measures = Measures(clock)
        self.failures = FailureHistory()
        self.save_times = SaveTimes(clock)

    def note_event(self, event: Event) -> None:
        """Take an event that the agent writes."""
        self.measures.note_event(event)
        self.failures.note_event(event)
        self.save_times.note_event(event)
