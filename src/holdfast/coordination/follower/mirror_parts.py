"""The remote tier as one host sees it: the parts that it writes there, and what is there.

Both are what its leader orders and reports.

Invariants:
- Another checkpoint or round replaces what is under way, and its outcomes are ignored from then on.
- A part that failed is not written again in its round: the leader begins another one, or writes it.
"""

from __future__ import annotations

from holdfast.coordination.effects import MirrorParts, ReportMirrored
from holdfast.coordination.inputs import MirrorPartsFailed, MirrorPartWritten
from holdfast.coordination.messages import REASON_CHARS_MAX, Mirrored, MirrorOrder
from holdfast.coordination.rank_runs import ranks_in, runs_of
from holdfast.coordination.turn import Turn
from holdfast.format.names import CheckpointId


class MirrorShare:
    """What one host has of an order for the remote tier.

    Attributes:
        newest: the newest checkpoint of the timeline that is there; None: none is known.
    """

    def __init__(self) -> None:
        self.newest: CheckpointId | None = None
        self._order: MirrorOrder | None = None
        self._asked: set[int] = set()
        self._done: set[int] = set()
        self._written_bytes = 0
        self._failure = ""

    @property
    def is_settled(self) -> bool:
        """Whether all ordered parts are written, or have failed."""
        return self._order is None or bool(self._failure) or self._asked == self._done

    @property
    def state(self) -> Mirrored | None:
        """What is reported to the leader; None without an order."""
        order = self._order
        if order is None:
            return None
        done = runs_of(self._done)
        return Mirrored(order.id, order.round, done, self._written_bytes, self._failure)

    def apply_order(self, turn: Turn, order: MirrorOrder | None) -> bool:
        """Apply the leader's order; return whether the state to report may have changed."""
        before, self._order = self._order, order
        if order is None:
            if before is not None:
                self._restart()
                turn.act(MirrorParts(before.id, before.round, frozenset()))
            return before is not None
        if before is None or (before.id, before.round) != (order.id, order.round):
            self._restart()
        new = frozenset(ranks_in(order.ranks)) - self._asked
        if new and not self._failure:
            self._asked |= new
            turn.act(MirrorParts(order.id, order.round, new))
        return order != before

    def learn_newest(self, turn: Turn, newest: CheckpointId | None) -> None:
        """Take the leader's report of what is there."""
        if newest is not None and newest != self.newest:
            turn.act(ReportMirrored(newest))
        self.newest = newest

    def release(self, turn: Turn) -> None:
        """Stop writing: another attempt has begun, maybe from a checkpoint that is not there."""
        self.apply_order(turn, None)
        self.newest = None

    def part_written(self, item: MirrorPartWritten) -> None:
        """Note that a part is there."""
        if self._is_present(item.id, item.round):
            self._done.add(item.rank)
            self._written_bytes += item.written_bytes

    def parts_failed(self, item: MirrorPartsFailed) -> None:
        """Note that parts could not be written."""
        if self._is_present(item.id, item.round):
            # An empty failure would mean none.
            self._failure = item.reason[:REASON_CHARS_MAX] or "it failed"

    def _is_present(self, checkpoint: object, number: int) -> bool:
        order = self._order
        return order is not None and (order.id, order.round) == (checkpoint, number)

    def _restart(self) -> None:
        self._asked.clear()
        self._done.clear()
        self._written_bytes = 0
        self._failure = ""
