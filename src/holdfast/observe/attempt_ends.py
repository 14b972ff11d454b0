"""Find out from events why an attempt has ended: a fold over them, in the order of time. Pure.

The first failure is the cause. Processes that wait for those of a lost host end soon after it, and
such an end is the loss of the host, also if they raise an exception. An announced preemption is
the cause of the next end.

If the events are those of one host, a host is lost if it is silent when processes end. If they are
those of all hosts, a host is lost that reports no end of its processes while others do: its events
may end with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.observe.events.schema import (
    AttemptFenced,
    Event,
    LeaderReplaced,
    ManagerOpened,
    PeerHeard,
    PeerSilent,
    PreemptionNoticed,
    RanksLost,
    TrainerLeft,
    TrainerLost,
)


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt has ended.

    Attributes:
        cause: `lost` (a process), `host_lost`, `preempted`, `fenced`, `exception` or `closed`.
        host: The host that was lost, or on which it ended first.
        time_us: When that was noticed.
    """

    cause: str
    host: str
    time_us: int

    @property
    def is_failure(self) -> bool:
        """Whether something else than its program has ended it."""
        return self.cause not in ("closed", "exception")


class EndOfAttempt:
    """Folds the events of one attempt.

    Args:
        sees_all: Whether they are the events of all hosts.
    """

    def __init__(self, *, sees_all: bool) -> None:
        self._sees_all = sees_all
        self._opened: set[str] = set()
        self._ended: set[str] = set()
        """The hosts that have reported the end of a process of theirs."""
        self._silent: dict[str, int] = {}
        """The hosts that do not report, and since when."""
        self._elsewhere: dict[str, int] = {}
        """The hosts of which others report that processes have ended."""
        self._lost_hosts: set[str] = set()
        """The hosts that have reported the loss of a process."""
        self._has_notice = False
        self._failure: AttemptEnd | None = None
        self._left: AttemptEnd | None = None
        self._error: AttemptEnd | None = None
        """The first end of a process by an exception, which may follow from a loss."""

    def note_event(self, event: Event, time_us: int = 0) -> None:
        """Take the next event, which was at `time_us`."""
        match event:
            case ManagerOpened():
                self._opened.add(event.host)
            case PeerSilent():
                self._silent.setdefault(event.of_host, time_us)
            case PeerHeard():
                self._silent.pop(event.of_host, None)
            case LeaderReplaced():
                self._silent.pop(event.leader, None)
                self._silent.setdefault(event.before, time_us)
            case PreemptionNoticed():
                self._has_notice |= self._failure is None and self._left is None
            case AttemptFenced():
                self._fail(AttemptEnd("fenced", event.host, time_us))
            case TrainerLost():
                self._ended.add(event.host)
                self._lost_hosts.add(event.host)
                self._lose(AttemptEnd("lost", event.host, time_us))
            case RanksLost(closed=False):
                self._elsewhere.setdefault(event.of_host, time_us)
                self._lose(AttemptEnd("lost", event.of_host, time_us))
            case TrainerLeft():
                self._ended.add(event.host)
                self._left = AttemptEnd("closed", event.host, time_us)
                if self._has_notice:
                    self._fail(AttemptEnd("preempted", event.host, time_us))
                elif event.after_error and self._error is None:
                    self._error = AttemptEnd("exception", event.host, time_us)

    def end(self) -> AttemptEnd | None:
        """Return how the attempt has ended, as far as the events show; None: it has not."""
        failure = self._failure
        if failure is None or failure.cause in ("preempted", "fenced") or not self._sees_all:
            return failure or self._error or self._left
        for host, time_us in self._elsewhere.items():
            if host not in self._lost_hosts:
                return AttemptEnd("host_lost", host, time_us)
        gone = self._opened - self._ended
        if not gone or gone == self._opened:
            return failure
        silent = [(self._silent[host], host) for host in gone if host in self._silent]
        time_us, host = min([*silent, (failure.time_us, min(gone))])
        return AttemptEnd("host_lost", host, time_us)

    def _lose(self, loss: AttemptEnd) -> None:
        if self._has_notice:
            self._fail(AttemptEnd("preempted", loss.host, loss.time_us))
        elif self._silent and not self._sees_all:
            self._fail(AttemptEnd("host_lost", next(iter(self._silent)), loss.time_us))
        else:
            self._fail(loss)

    def _fail(self, failure: AttemptEnd) -> None:
        self._failure = self._failure or failure


class AttemptEnds:
    """Follows the attempts of a run, as one host sees them.

    Attributes:
        attempt: The present attempt.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._end = EndOfAttempt(sees_all=False)

    @property
    def cause(self) -> str:
        """Why the present attempt has ended; empty: it has not."""
        end = self._end.end()
        return end.cause if end is not None else ""

    def note_event(self, event: Event) -> str:
        """Take the next event; return the cause if it is the failure that ends the attempt."""
        if event.run_attempt > self.attempt:
            self.attempt, self._end = event.run_attempt, EndOfAttempt(sees_all=False)
        before = self._end.end()
        self._end.note_event(event)
        end = self._end.end()
        is_new = end is not None and end.is_failure and not (before and before.is_failure)
        return end.cause if end is not None and is_new else ""
