"""Tell from a host's events why an attempt has ended. Pure."""

from __future__ import annotations

from holdfast.observe.events.schema import (
    AttemptFenced,
    Event,
    LeaderReplaced,
    PeerHeard,
    PeerSilent,
    PreemptionNoticed,
    RanksLost,
    TrainerLeft,
    TrainerLost,
)


class AttemptEnds:
    """Follows the attempts of a run, as one host sees them; the first failure is the cause.

    Attributes:
        attempt: The present attempt.
        cause: Why it has ended: `lost` (a process), `host_lost`, `preempted`, `fenced`, `closed`;
            empty: it has not.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.cause = ""
        self._silent: set[str] = set()
        """The hosts of the attempt that do not report; a lost host never does again."""

    def note_event(self, event: Event) -> str:
        """Take the next event; return the cause if it is the failure that ends the attempt."""
        if event.run_attempt > self.attempt:
            self.attempt, self.cause = event.run_attempt, ""
            self._silent.clear()
        match event:
            case PeerSilent():
                self._silent.add(event.of_host)
            case LeaderReplaced():
                self._silent.discard(event.leader)
                self._silent.add(event.before)
            case PeerHeard():
                self._silent.discard(event.of_host)
            case PreemptionNoticed():
                return self._end("preempted")
            case TrainerLost() | RanksLost(closed=False):
                # Processes that wait for those of a lost host end soon after it.
                return self._end("host_lost" if self._silent else "lost")
            case AttemptFenced():
                return self._end("fenced")
            case TrainerLeft():
                self.cause = self.cause or "closed"
        return ""

    def _end(self, cause: str) -> str:
        if self.cause:
            return ""
        self.cause = cause
        return cause
