"""Whose orders a host follows, and to whom it turns where its leader is silent.

The successors stand in an order that all hosts know. Term t is led by successor t modulo their
number, so that a higher term tells a later choice. A host turns to the next term after a silence,
and follows no lower term from then on; a leader that comes back takes a term of its own that is
higher still. Two may lead for a while where the network is cut: what they do is harmless twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.messages import Orders
from holdfast.coordination.settings import Settings


@dataclass(slots=True)
class Election:
    """The leader that one host follows, and how far it has heard of it."""

    settings: Settings
    attempt: int = 0
    successors: tuple[str, ...] = ()
    term: int = 0
    incarnation: int = 0
    seq: int = 0
    ack: int = 0
    last_orders_at_secs: float = 0.0

    @property
    def leader(self) -> str | None:
        """The host that leads the present term; None where none is known."""
        return leader_of(self.successors, self.term) if self.successors else None

    def follow(self, attempt: int, successors: tuple[str, ...], term: int, now_secs: float) -> None:
        """Follows another attempt's leader, or another term's, of whom nothing was heard yet."""
        self.attempt, self.successors, self.term = attempt, successors, term
        self.incarnation = self.seq = self.ack = 0
        self.last_orders_at_secs = now_secs

    def accepts(self, orders: Orders, now_secs: float) -> bool:
        """Whether these orders count; then they are the last that were heard."""
        stamp = orders.term, orders.incarnation, orders.seq
        if orders.attempt == self.attempt and stamp <= (self.term, self.incarnation, self.seq):
            return False
        self.attempt, self.successors = orders.attempt, orders.successors
        self.term, self.incarnation, self.seq = stamp
        self.ack = orders.version
        self.last_orders_at_secs = now_secs
        return True

    def next_if_silent(self, now_secs: float) -> bool:
        """Turns to the next successor where the present leader is silent; whether it did."""
        if not self.successors or now_secs < self.silent_at_secs():
            return False
        self.follow(self.attempt, self.successors, self.term + 1, now_secs)
        return True

    def silent_at_secs(self) -> float:
        """When the leader will have been silent for too long."""
        return self.last_orders_at_secs + self.settings.silence_secs


def leader_of(successors: tuple[str, ...], term: int) -> str:
    """The host that leads in `term`."""
    return successors[term % len(successors)]


def term_above(successors: tuple[str, ...], host: str, term: int) -> int:
    """The lowest term above `term` that `host` leads."""
    index, count = successors.index(host), len(successors)
    above = term - term % count + index
    return above if above > term else above + count
