"""The checkpoints of which one host holds parts, and the leader's commands for them.

Invariants:
- A checkpoint is dropped only after a verdict that releases it.
- Parts are written oldest first, one checkpoint at a time; at most `PULLS_MAX` pulls are under way.
- At most `HELD_MAX` checkpoints are tracked; a part of any further checkpoint is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.coordination.effects import Drop, Persist, Pull, ReportOutcome
from holdfast.coordination.inputs import (
    Found,
    PartAbandoned,
    PartSealed,
    PartsWritten,
    PullFailed,
    ReplicaSealed,
    WriteFailed,
)
from holdfast.coordination.messages import (
    COMPLETE_STATUSES,
    REASON_CHARS_MAX,
    CheckpointStatus,
    Command,
    Held,
    PullOrder,
    WriteOrder,
)
from holdfast.coordination.rank_runs import ranks_in, runs_of
from holdfast.coordination.settings import HELD_MAX, PULLS_MAX, TRIES_MAX, Settings
from holdfast.coordination.turn import Turn
from holdfast.format.names import AttemptId, CheckpointId, age_of

_FINAL = (CheckpointStatus.COMMITTED, CheckpointStatus.FAILED, CheckpointStatus.DROPPED)
_NOTIFIED = (CheckpointStatus.PROTECTED, *_FINAL)
"""The statuses of which the ranks here are notified."""


@dataclass(slots=True)
class _Holding:
    """One checkpoint of which this host holds parts, or pulls them, or is to report on it.

    Attributes:
        own: the ranks whose part was sealed here; `replicas`: those whose part is a replica.
        written: the ranks whose part this host has made durable.
        failure: why this host cannot write its parts in `round`.
        abandoned: why a rank here could not make its part.
        notified: the last status of which the ranks here were notified.
        status, reason: the leader's last verdict.
    """

    id: CheckpointId
    part_count: int
    is_due: bool = False
    own: set[int] = field(default_factory=set)
    replicas: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    failure: str = ""
    round: int = 0
    abandoned: str = ""
    notified: CheckpointStatus | None = None
    status: CheckpointStatus = CheckpointStatus.OPEN
    reason: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the ranks here wait for its end."""
        if self.is_due:
            return self.notified not in _FINAL
        return bool(self.own) and self.notified not in _NOTIFIED

    def as_held(self, *, with_status: bool) -> Held:
        return Held(
            id=self.id,
            part_count=self.part_count,
            is_due=self.is_due,
            own=runs_of(self.own),
            replicas=runs_of(self.replicas),
            written=runs_of(self.written),
            failure=self.failure,
            round=self.round,
            abandoned=self.abandoned,
            status=self.status if with_status else CheckpointStatus.OPEN,
        )


class HostInventory:
    """The checkpoints that one host tracks.

    A pull cannot be cancelled: one whose checkpoint was dropped moves from `_pulling` to
    `_unwanted` until it ends, and still counts towards `PULLS_MAX`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held: dict[CheckpointId, _Holding] = {}
        self._writes: tuple[WriteOrder, ...] = ()
        self._pull_orders: tuple[PullOrder, ...] = ()
        self._writing: CheckpointId | None = None
        self._write_at_secs = 0.0
        self._write_tries = 0
        """The failed writes since the last success, or since the newest checkpoint has failed."""
        self._pulling: set[tuple[CheckpointId, int]] = set()
        self._unwanted: set[tuple[CheckpointId, int]] = set()
        self._pull_at_secs: dict[tuple[CheckpointId, int], float] = {}
        # When pulls failed: orders from before may be outdated, so they are not tried again.
        self._pull_failed_at_secs: dict[tuple[CheckpointId, int], float] = {}
        self._ordered_at_secs = float("-inf")
        self._releasable: dict[CheckpointId, str] = {}

    def adopt_images(self, found: Found) -> None:
        """Adopt what a previous agent left in RAM, of the newest `HELD_MAX` checkpoints."""
        newest_first = sorted(found.ram, key=age_of, reverse=True)
        for checkpoint in newest_first[:HELD_MAX]:
            listed = found.ram[checkpoint]
            replicas = set(found.replicas.get(checkpoint, ()))
            holding = _Holding(checkpoint, listed.part_count, checkpoint in found.due)
            holding.own, holding.replicas = set(listed.ranks) - replicas, replicas
            self._held[checkpoint] = holding

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self._held

    @property
    def under_way(self) -> int:
        """The number of effects whose outcome is still to come."""
        return len(self._pulling) + len(self._unwanted) + (self._writing is not None)

    def is_awaited(self, checkpoint: CheckpointId) -> bool:
        """Return whether the ranks here wait for the end of a checkpoint that is held."""
        return self._held[checkpoint].is_waiting

    @property
    def is_writing(self) -> bool:
        """Whether parts are being written to the durable tier."""
        return self._writing is not None

    @property
    def is_writing_whole(self) -> bool:
        """Whether parts are being written of a checkpoint that has been complete."""
        holding = self._held.get(self._writing) if self._writing is not None else None
        return holding is not None and holding.status in COMPLETE_STATUSES

    def states(self, *, with_status: bool = False) -> tuple[Held, ...]:
        """Return the states for a report, the oldest first; `with_status` in reports to a start."""
        return tuple(
            self._held[checkpoint].as_held(with_status=with_status)
            for checkpoint in sorted(self._held)
        )

    def verdict(self, checkpoint: CheckpointId) -> tuple[CheckpointStatus, str]:
        """Return the status that the leader reported last, and its reason; open if none."""
        holding = self._held.get(checkpoint)
        return (
            (holding.status, holding.reason) if holding is not None else (CheckpointStatus.OPEN, "")
        )

    def parts(self, checkpoint: CheckpointId) -> set[int]:
        """Return the ranks whose part is in RAM here."""
        holding = self._held.get(checkpoint)
        return holding.own | holding.replicas if holding is not None else set()

    def highest_sealed(self, attempt: AttemptId, rank: int) -> int:
        """Return the highest step of `attempt` whose part of `rank` was made here; -1 if none."""
        return max(
            (h.id.step for h in self._held.values() if _has_own(h, attempt, rank)), default=-1
        )

    # Local events.

    def note_sealed(self, turn: Turn, item: PartSealed) -> None:
        """Add a part that a rank here has sealed."""
        refusal = CheckpointStatus.FAILED if item.is_due else CheckpointStatus.DROPPED
        holding = self._held_entry(turn, item.id, item.part_count, refusal)
        if holding is None:
            return
        (holding.own if item.in_ram else holding.written).add(item.rank)
        holding.is_due |= item.is_due

    def note_abandoned(self, turn: Turn, item: PartAbandoned) -> None:
        """Note that a rank could not make its part."""
        holding = self._held_entry(turn, item.id, item.part_count)
        if holding is not None:
            holding.abandoned = _short(item.reason)

    def refuse(
        self,
        turn: Turn,
        checkpoint: CheckpointId,
        reason: str,
        status: CheckpointStatus = CheckpointStatus.DROPPED,
    ) -> None:
        """Drop a part that this host may not hold, and notify its ranks."""
        turn.act(Drop(checkpoint, reason))
        turn.act(ReportOutcome(checkpoint, status, reason))

    def replica_sealed(self, turn: Turn, item: ReplicaSealed) -> None:
        """Add a replica of another host's part, or drop it if its checkpoint was dropped."""
        part = item.id, item.rank
        self._pulling.discard(part)
        self._pull_at_secs.pop(part, None)
        self._pull_failed_at_secs.pop(part, None)
        if part in self._unwanted:
            self._unwanted.discard(part)
            if item.id not in self._held:
                turn.act(Drop(item.id, "it was dropped while it was pulled"))
                return
        holding = self._held_entry(turn, item.id, item.part_count)
        if holding is not None and item.rank not in holding.own:
            holding.replicas.add(item.rank)

    def pull_failed(self, turn: Turn, item: PullFailed) -> None:
        """Schedule the next try of a failed pull, unless its checkpoint was dropped."""
        part = item.id, item.rank
        self._pulling.discard(part)
        if part in self._unwanted:
            self._unwanted.discard(part)
        else:
            self._pull_at_secs[part] = turn.now_secs + self._settings.storage_retry_secs
            self._pull_failed_at_secs[part] = turn.now_secs

    def parts_written(self, item: PartsWritten) -> None:
        """Note that parts are durable."""
        self._writing, self._write_tries = None, 0
        holding = self._held.get(item.id)
        if holding is not None:
            holding.written |= item.ranks

    def write_failed(self, turn: Turn, item: WriteFailed) -> None:
        """Schedule the next try of a failed write; after `TRIES_MAX` it is reported as failed.

        Checkpoints that wait behind it then get one try each, without a pause, because the storage
        has failed for as long for them. The newest one gets all its tries.
        """
        self._writing = None
        self._write_tries += 1
        self._write_at_secs = turn.now_secs + self._settings.storage_retry_secs
        holding = self._held.get(item.id)
        if holding is None:
            return
        if self._write_tries >= TRIES_MAX or item.newer_attempt:
            # An empty failure would mean none.
            holding.failure = _short(item.reason) or "it failed"
            waiting = sum(1 for _ in self._writes_left())
            if waiting:
                self._write_at_secs = turn.now_secs
            if waiting <= 1:
                self._write_tries = 0

    # Commands of the leader.

    def apply_command(self, turn: Turn, command: Command) -> None:
        """Apply the leader's command: notify the ranks of verdicts, and replace all orders."""
        self._releasable.clear()
        for verdict in command.verdicts:
            holding = self._held.get(verdict.id)
            if holding is None:
                continue
            holding.status, holding.reason = verdict.status, verdict.reason
            if verdict.status in _NOTIFIED and verdict.status is not holding.notified:
                holding.notified = verdict.status
                turn.act(ReportOutcome(holding.id, verdict.status, verdict.reason, holding.is_due))
            if verdict.may_release:
                self._releasable[verdict.id] = (
                    verdict.reason or "it was replaced by newer checkpoints"
                )
        self._writes, self._pull_orders = command.writes, command.pulls
        self._ordered_at_secs = turn.now_secs
        ordered = {(o.id, rank) for o in command.pulls for rank in ranks_in(o.ranks)}
        for times in (self._pull_at_secs, self._pull_failed_at_secs):
            for part in times.keys() - ordered:
                del times[part]

    def release(self) -> None:
        """Discard all orders: another attempt has begun."""
        self._writes, self._pull_orders = (), ()
        self._releasable.clear()

    def run_due(self, turn: Turn, is_frozen: bool) -> bool:
        """Begin the writes and pulls that are due, and drop what was released.

        Args:
            turn: the present turn.
            is_frozen: drop nothing; a start may rely on what this host has reported.

        Returns:
            Whether a checkpoint was dropped.
        """
        has_dropped = False
        if not is_frozen:
            # The parts that are being written are read from RAM, so they stay until that ends.
            for checkpoint in [c for c in self._releasable if c != self._writing]:
                self._drop(turn, checkpoint, self._releasable.pop(checkpoint))
                has_dropped = True
        self._pull(turn)
        if self._writing is None and turn.now_secs >= self._write_at_secs:
            self._write(turn)
        return has_dropped

    def next_at_secs(self, now_secs: float) -> float:
        """Return when a failed write or pull is tried again; infinity if there is none."""
        soonest_secs = float("inf")
        if self._writes and self._writing is None and self._write_at_secs > now_secs:
            soonest_secs = self._write_at_secs
        for at_secs in self._pull_at_secs.values():
            if now_secs < at_secs < soonest_secs:
                soonest_secs = at_secs
        return soonest_secs

    def _drop(self, turn: Turn, checkpoint: CheckpointId, reason: str) -> None:
        holding = self._held.pop(checkpoint, None)
        if holding is None:
            return
        # The leader may have learned too late that the checkpoint is due here, and released it
        # without a final verdict. So the ranks that wait for its end are notified here.
        is_awaited = holding.is_due or holding.status is CheckpointStatus.OPEN
        if is_awaited and holding.notified not in _FINAL:
            turn.act(ReportOutcome(checkpoint, CheckpointStatus.DROPPED, reason))
        elif holding.notified is None:
            turn.act(ReportOutcome(checkpoint, CheckpointStatus.PROTECTED, reason))
        # These pulls cannot be cancelled; their results are dropped when they end.
        for part in [part for part in self._pulling if part[0] == checkpoint]:
            self._pulling.discard(part)
            self._unwanted.add(part)
        turn.act(Drop(checkpoint, reason))

    def _write(self, turn: Turn) -> None:
        left = next(self._writes_left(), None)
        if left is not None:
            self._writing = left.id
            turn.act(left)

    def _writes_left(self) -> Iterator[Persist]:
        """Yield the ordered writes that are neither done nor failed, in the leader's order."""
        for order in self._writes:
            holding = self._held.get(order.id)
            if holding is None:
                continue
            if order.round > holding.round:
                holding.round, holding.failure = order.round, ""
            here = (holding.own | holding.replicas) - holding.written
            ranks = here.intersection(ranks_in(order.ranks))
            if ranks and not holding.failure:
                yield Persist(order.id, frozenset(ranks))

    def _pull(self, turn: Turn) -> None:
        for order in self._pull_orders:
            for rank in ranks_in(order.ranks):
                if len(self._pulling) + len(self._unwanted) >= PULLS_MAX:
                    return
                part = order.id, rank
                if part in self._pulling or part in self._unwanted:
                    continue
                if turn.now_secs < self._pull_at_secs.get(part, turn.now_secs):
                    continue
                if self._ordered_at_secs <= self._pull_failed_at_secs.get(part, float("-inf")):
                    # The leader may have released the part, in orders that were lost.
                    continue
                holding = self._held_entry(turn, order.id, order.part_count)
                if holding is None or rank in holding.replicas or rank in holding.own:
                    continue
                self._pull_at_secs.pop(part, None)
                self._pull_failed_at_secs.pop(part, None)
                self._pulling.add(part)
                turn.act(Pull(order.id, rank, holding.part_count, order.source))

    def _held_entry(
        self,
        turn: Turn,
        checkpoint: CheckpointId,
        part_count: int,
        refusal: CheckpointStatus = CheckpointStatus.DROPPED,
    ) -> _Holding | None:
        holding = self._held.get(checkpoint)
        if holding is None:
            if len(self._held) >= HELD_MAX:
                reason = f"this host already holds {HELD_MAX} checkpoints, the most that it may"
                self.refuse(turn, checkpoint, reason, refusal)
                return None
            holding = self._held[checkpoint] = _Holding(checkpoint, part_count)
        return holding


def _has_own(holding: _Holding, attempt: AttemptId, rank: int) -> bool:
    return holding.id.attempt == attempt and rank in holding.own


def _short(reason: str) -> str:
    return reason[:REASON_CHARS_MAX]
