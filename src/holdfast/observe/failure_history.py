"""Count the failures of a run and the time in which it trained, over all attempts that are known.

A preempted job has saved its last step, so it counts as no failure. Owned by the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from holdfast.coordination.messages import TargetKind
from holdfast.observe.attempt_ends import AttemptEnds
from holdfast.observe.events.reader import EventReader
from holdfast.observe.events.schema import (
    Event,
    FirstStep,
    PreemptionNoticed,
    StepProgress,
    TrainerLeft,
    TrainerLost,
)
from holdfast.observe.events.segments import RUN
from holdfast.policy.failure_rates import failure_rate
from holdfast.store.durable import RunHome

KINDS = {"lost": "process", "host_lost": "host"}
OF_TRAINING = (FirstStep, StepProgress, PreemptionNoticed, TrainerLeft, TrainerLost)


class FailureHistory:
    """The failures by kind, and the hours of training in which they occurred."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(KINDS.values(), 0)
        self.hours = 0.0
        self._ends = AttemptEnds()
        self._last: tuple[int, datetime] | None = None
        """The attempt and the time of the last event of a training."""

    def note_event(self, event: Event) -> None:
        """Take the next event of this host."""
        cause = self._ends.note_event(event)
        if cause in KINDS:
            self.counts[KINDS[cause]] += 1
        if isinstance(event, OF_TRAINING):
            if self._last is not None and self._last[0] == event.run_attempt:
                # A clock that is set back takes no hour away.
                secs = (event.time - self._last[1]).total_seconds()
                self.hours += max(0.0, secs) / 3600
            self._last = event.run_attempt, event.time

    def add_history(self, earlier: FailureHistory) -> None:
        """Take over what earlier agents of the run had counted."""
        self.hours += earlier.hours
        for kind, count in earlier.counts.items():
            self.counts[kind] += count

    def per_sec(self, kind: TargetKind, *, has_own_ram: bool, has_copies: bool) -> float:
        """Return the failures a second for which a tier is the nearest one that survives them.

        Args:
            kind: The tier.
            has_own_ram: RAM has a policy of its own, so that it has newer checkpoints.
            has_copies: Other hosts' RAM has copies, so that RAM survives the loss of a host.
        """
        by_kind = {
            cause: failure_rate(count, self.hours).per_hour / 3600
            for cause, count in self.counts.items()
        }
        by_ram = {"process", "host"} if has_copies else {"process"}
        if kind is TargetKind.RAM:
            return sum(by_kind[cause] for cause in by_ram)
        if not has_own_ram:
            return sum(by_kind.values())
        rest = sum(rate for cause, rate in by_kind.items() if cause not in by_ram)
        # With copies only the loss of several hosts at once is left, which was not seen.
        return rest or failure_rate(0, self.hours).per_hour / 3600


def read_history(home: RunHome, host: str, before: datetime) -> FailureHistory:
    """Return the failures that a host's events have from before a time; may take seconds.

    Each host notices the failures of all, so that the events of one are enough.
    """
    history = FailureHistory()
    items: Iterable[object] = EventReader(home, only=(host, RUN)).read(is_live=True)
    for item in items:
        if isinstance(item, Event) and item.time < before:
            history.note_event(item)
    return history
