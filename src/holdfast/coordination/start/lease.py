"""The lease of an attempt: written by the host that leads it, read by starts on other hosts.

A start that gets no answer from the agent of the newest attempt reads the lease to find out whether
the attempt lives. The lease has no other use: attempts are fenced by their records, so a wrong
lease costs a wait or a takeover, and never a checkpoint.

Invariants:
- A lease is renewed only while trainers of its attempt are attached to the host that leads it and
  none of its ranks, on any host, is known to have ended; or, as one that says so, while that host
  stores what they have left. Starts wait for such a lease, and are not refused.
- At most one request for a lease is under way on a host in each durable tier; one that hangs stops
  only the renewals there.
- Ages are differences of two times of one file system. The clocks of two hosts are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from holdfast.coordination.effects import ReleaseLease, RenewLease
from holdfast.coordination.lease_seen import LeaseSeen
from holdfast.coordination.settings import (
    LEASE_READ_SECS,
    LEASE_RENEW_SECS,
    LEASE_SECS,
    STORING_SECS,
)
from holdfast.coordination.turn import Turn
from holdfast.format.names import NO_ATTEMPT, AttemptId


@dataclass(slots=True)
class LeaseRenewal:
    """The lease that one host writes. `held` is the attempt whose lease may exist."""

    incarnation: int
    held: AttemptId = NO_ATTEMPT
    _counter: int = 0
    _due_at_secs: float = float("-inf")
    _is_writing: bool = False
    _is_storing: bool = False

    def work(self, turn: Turn, attempt: AttemptId, *, is_storing: bool) -> None:
        """Renew the lease of `attempt`, and release that of any other attempt.

        Args:
            turn: the present turn.
            attempt: the attempt that this host leads and whose trainers live, or whose checkpoints
                are being stored; or `NO_ATTEMPT`.
            is_storing: its trainers have ended.
        """
        if self._is_writing:
            return
        # Release first: the lease of an attempt that this host no longer leads delays starts.
        if self.held not in (NO_ATTEMPT, attempt):
            turn.act(ReleaseLease(self.held))
            self.held, self._is_writing = NO_ATTEMPT, True
            self._due_at_secs = float("-inf")
        elif attempt and (turn.now_secs >= self._due_at_secs or is_storing is not self._is_storing):
            self._counter += 1
            turn.act(RenewLease(attempt, self.incarnation, self._counter, is_storing))
            self.held, self._is_writing, self._is_storing = attempt, True, is_storing
            self._due_at_secs = turn.now_secs + LEASE_RENEW_SECS

    def written(self) -> None:
        """Note the end of the last request, which may have failed."""
        self._is_writing = False

    def next_at_secs(self) -> float:
        """Return when to renew the lease; infinity if none is held or a request is under way."""
        return self._due_at_secs if self.held and not self._is_writing else float("inf")


class LeaseVerdict(Enum):
    """What a lease shows of its attempt."""

    DEAD = auto()
    LIVE = auto()
    UNKNOWN = auto()
    STORING = auto()
    """It has ended, and its checkpoints are being stored."""
    LATE = auto()
    """They still are, and a start waits no more."""


@dataclass(slots=True)
class LeaseWatch:
    """One start's wait for the lease of another host's attempt."""

    since_secs: float
    lease: LeaseSeen | None = None
    over_at_secs: float = float("-inf")
    next_read_at_secs: float = float("-inf")
    stores_until_secs: float | None = None
    """Until when the start waits for checkpoints that are being stored; None: none are."""

    def judge(self, asked_at_secs: float, now_secs: float, lease: LeaseSeen | None) -> LeaseVerdict:
        """Judge whether the attempt lives, from a lease that was read.

        Args:
            asked_at_secs: when the read was requested.
            now_secs: the present time.
            lease: what was read; None if the attempt has no lease.

        Returns:
            `LIVE` if the lease was renewed by living trainers since the first read, `DEAD` if it
            has expired or does not exist, `LATE` if checkpoints are being stored for `STORING_SECS`
            since the first read. Else `STORING` or `UNKNOWN`; the next read is due at
            `next_read_at_secs`.
        """
        if lease is None or lease.age_secs >= LEASE_SECS:
            return LeaseVerdict.DEAD
        if lease.is_storing:
            return self._await_storing(asked_at_secs, now_secs, lease)
        if self.lease is None:
            # A modification time in the future gives a negative age; the wait is still no longer
            # than one lease.
            self.over_at_secs = now_secs + min(LEASE_SECS - lease.age_secs, LEASE_SECS)
            self.lease = lease
        elif lease.stamp != self.lease.stamp:
            return LeaseVerdict.LIVE
        elif asked_at_secs >= self.over_at_secs:
            return LeaseVerdict.DEAD
        self.next_read_at_secs = min(now_secs + LEASE_READ_SECS, self.over_at_secs)
        return LeaseVerdict.UNKNOWN

    def _await_storing(
        self, asked_at_secs: float, now_secs: float, lease: LeaseSeen
    ) -> LeaseVerdict:
        """Wait until the lease is removed, has expired, or the time for storing has passed."""
        if self.stores_until_secs is None:
            self.stores_until_secs = now_secs + STORING_SECS
        if self.lease is None or lease.stamp != self.lease.stamp:
            expires_at_secs = now_secs + min(LEASE_SECS - lease.age_secs, LEASE_SECS)
            self.over_at_secs = min(expires_at_secs, self.stores_until_secs)
            self.lease = lease
        if asked_at_secs >= self.stores_until_secs:
            return LeaseVerdict.LATE
        if asked_at_secs >= self.over_at_secs:
            return LeaseVerdict.DEAD
        self.next_read_at_secs = min(now_secs + LEASE_READ_SECS, self.over_at_secs)
        return LeaseVerdict.STORING
