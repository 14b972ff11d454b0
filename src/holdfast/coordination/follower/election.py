"""The election of a leader: whose orders a host follows, and whose when its leader is silent.

All hosts know the successors in the same order. Successor t modulo their number leads term t, so a
higher term is a later choice. After a silence a host follows the next term, and never a lower one
again. A leader that comes back takes a higher term of its own. While the network is partitioned,
two hosts may lead; what two leaders do is idempotent (see docs/protocol.md, "Leader lost").
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.messages import Orders
from holdfast.coordination.settings import Settings
from holdfast.format.names import NO_ATTEMPT, AttemptId


@dataclass(slots=True)
class Election:
    """The leader that one host follows, and the numbers of its last orders.

    `incarnation` is 0 until orders of the present term have arrived.
    """

    settings: Settings
    attempt: AttemptId = NO_ATTEMPT
    successors: tuple[str, ...] = ()
    term: int = 0
    incarnation: int = 0
    seq: int = 0
    ack: int = 0
    last_orders_at_secs: float = 0.0

    @property
    def leader(self) -> str | None:
        """The host that leads the present term; None if none is known."""
        return leader_of(self.successors, self.term) if self.successors else None

    def follow(
        self, attempt: AttemptId, successors: tuple[str, ...], term: int, now_secs: float
    ) -> None:
        """Follow the leader of another attempt or term, whose first orders are still to come."""
        self.attempt, self.successors, self.term = attempt, successors, term
        # Zero numbers: the first orders of the new leader are accepted, whatever theirs are.
        self.incarnation = self.seq = self.ack = 0
        self.last_orders_at_secs = now_secs

    def accepts(self, orders: Orders, now_secs: float, *, is_for_this: bool) -> bool:
        """Return whether these orders are newer than the last ones, and record them if so.

        Args:
            orders: The orders.
            now_secs: The present time.
            is_for_this: They are for this incarnation of the agent; else nothing of their command
                is acknowledged.
        """
        # Orders of a newer attempt are accepted with any numbers: its terms begin at 0 again.
        stamp = orders.term, orders.incarnation, orders.seq
        if orders.attempt == self.attempt and stamp <= (self.term, self.incarnation, self.seq):
            return False
        self.attempt, self.successors = orders.attempt, orders.successors
        self.term, self.incarnation, self.seq = stamp
        self.ack = orders.version if is_for_this else 0
        self.last_orders_at_secs = now_secs
        return True

    def next_if_silent(self, now_secs: float) -> bool:
        """Follow the next successor if the present leader is silent; return whether it was."""
        if not self.successors or now_secs < self.silent_at_secs():
            return False
        self.follow(self.attempt, self.successors, self.term + 1, now_secs)
        return True

    def silent_at_secs(self) -> float:
        """Return when the leader counts as silent, unless orders arrive before."""
        return self.last_orders_at_secs + self.settings.silence_secs


def leader_of(successors: tuple[str, ...], term: int) -> str:
    """Return the host that leads `term`."""
    return successors[term % len(successors)]


def term_above(successors: tuple[str, ...], host: str, term: int) -> int:
    """Return the lowest term above `term` that `host` leads."""
    index, count = successors.index(host), len(successors)
    above = term - term % count + index
    return above if above > term else above + count
