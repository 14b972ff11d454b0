"""The leader's orders for the remote tier: committed checkpoints are copied there, one at a time.

Which checkpoint is due there is decided outside, by the tier's policy (`MirrorWanted`). A committed
checkpoint does not change any more, so copying it needs no agreement: each host writes the parts of
its ranks, this host those of all others, and this host commits once all are there.

Invariants:
- One checkpoint is under way at a time. The next one waits until it is copied or has failed.
- A commit is ordered only after all parts were reported as written there; the store checks this
  again.
- A try that fails is repeated, with pauses that double up to `PAUSE_SECS_MAX`; only the end of the
  run waits for it.
- A host that fails, is lost, or writes nothing for `STALL_SECS` is left out of the present try. The
  leader's host writes its parts then; they are in the shared durable tier.

See docs/decisions/0030 and docs/decisions/0044.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.coordination.effects import MirrorCommit, MirrorEnded
from holdfast.coordination.inputs import MirrorCommitFailed, MirrorTarget
from holdfast.coordination.messages import Mirrored, MirrorOrder
from holdfast.coordination.rank_runs import ranks_in, runs_of
from holdfast.coordination.turn import Turn
from holdfast.format.names import CheckpointId

PAUSE_SECS_MIN, PAUSE_SECS_MAX = 1.0, 60.0
STALL_SECS = 120.0


@dataclass(slots=True)
class _Share:
    """The parts that one host is to write in the present try.

    `moved_at_secs` is when it was ordered, or when its last part was reported.
    """

    ranks: set[int]
    moved_at_secs: float
    done: set[int] = field(default_factory=set)
    written_bytes: int = 0


class Mirror:
    """The copies to the remote tier of one leader, on `host`.

    Attributes:
        target: the checkpoint that is under way; None if there is none.
        round: the number of the present try; hosts begin anew with each.
        newest: the newest checkpoint of the timeline that is there; None: none is known.
        committing: the checkpoint whose manifest is being written there.
        is_changed: orders have changed since the leader reset this.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self.target: MirrorTarget | None = None
        self._next: MirrorTarget | None = None
        self.round = 0
        self.newest: CheckpointId | None = None
        self.committing: CheckpointId | None = None
        self.is_changed = False
        self._shares: dict[str, _Share] | None = None
        """The shares of the present try; None until they are assigned."""
        self._failures = 0
        self._try_at_secs = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether no checkpoint is under way or waits."""
        return self.target is None and self._next is None and self.committing is None

    @property
    def is_trying(self) -> bool:
        """Whether a checkpoint is under way whose last try has not failed."""
        return self.target is not None and not self._failures

    @property
    def ids(self) -> frozenset[CheckpointId]:
        """The checkpoints that are under way or wait."""
        targets = (target.id for target in (self.target, self._next) if target is not None)
        return frozenset(targets) | ({self.committing} if self.committing else frozenset())

    @property
    def done(self) -> frozenset[int]:
        """The ranks whose parts are there, as far as hosts have reported in the present try."""
        shares = self._shares.values() if self._shares is not None else ()
        return frozenset(rank for share in shares for rank in share.done)

    def want(self, target: MirrorTarget) -> None:
        """Copy `target` next; at once if none is under way, or its last try has failed."""
        if self.target is None or (self._failures and self.committing is None):
            self._begin(target)
            self._next = None
        else:
            self._next = target if target.id != self.target.id else None

    def found(self, newest: CheckpointId | None) -> None:
        """Note the newest checkpoint of the timeline that is there."""
        self.is_changed |= newest != self.newest
        self.newest = newest

    def forget(self, checkpoint: CheckpointId) -> None:
        """Stop copying a checkpoint that was deleted."""
        if self.newest == checkpoint:
            self.found(None)
        if self._next is not None and self._next.id == checkpoint:
            self._next = None
        if self.target is not None and self.target.id == checkpoint:
            self._begin(self._next)
            self._next = None

    def order_for(self, host: str) -> MirrorOrder | None:
        """Return what a host is to write; None if nothing."""
        share = self._shares.get(host) if self._shares is not None else None
        if self.target is None or share is None or not share.ranks:
            return None
        return MirrorOrder(self.target.id, runs_of(share.ranks), self.round)

    def take_report(self, turn: Turn, host: str, mirrored: Mirrored | None) -> None:
        """Take a host's report of what it has written."""
        if mirrored is None:
            return
        if mirrored.round > self.round:
            # A previous leader has tried more often; hosts ignore the round that they are in.
            self.round = mirrored.round
            self._assign_again()
        share = self._shares.get(host) if self._shares is not None else None
        is_present = self.target is not None and mirrored.id == self.target.id
        if share is None or not is_present or mirrored.round != self.round:
            return
        done = share.ranks.intersection(ranks_in(mirrored.done))
        if not done <= share.done:
            share.done |= done
            share.moved_at_secs, share.written_bytes = turn.now_secs, mirrored.written_bytes
        if mirrored.failure and share.done != share.ranks:
            if host == self._host:
                self._failed(turn, mirrored.failure)
            else:
                self._take_over(host)

    def host_lost(self, host: str) -> None:
        """Write the parts of a host that is lost from this host."""
        if host != self._host:
            self._take_over(host)

    def committed(self, turn: Turn, checkpoint: CheckpointId) -> None:
        """Note that a manifest is written there."""
        self.committing = None
        self._failures, self._try_at_secs = 0, turn.now_secs
        if self.target is not None and self.target.id == checkpoint:
            shares = (self._shares or {}).values()
            host_count = sum(bool(share.done) for share in shares)
            written_bytes = sum(share.written_bytes for share in shares)
            self.found(checkpoint)
            turn.act(MirrorEnded(checkpoint, host_count, written_bytes))
            self._begin(self._next)
            self._next = None

    def commit_failed(self, turn: Turn, item: MirrorCommitFailed) -> None:
        """Schedule the next try of a commit that has failed, or whose result is unknown."""
        self.committing = None
        if self.target is not None and self.target.id == item.id:
            self._failed(turn, item.reason)

    def run_due(
        self, turn: Turn, ranks_by_host: Callable[[], Mapping[str, Collection[int]]]
    ) -> None:
        """Assign the parts of a try that begins, move those that stall, and commit.

        Args:
            turn: the present turn.
            ranks_by_host: returns the ranks of the hosts that live; of others this host writes the
                parts.
        """
        target = self.target
        if target is None or self.committing is not None or turn.now_secs < self._try_at_secs:
            return
        if self._shares is None:
            self._assign(turn, target, ranks_by_host())
        assert self._shares is not None
        for host, share in list(self._shares.items()):
            is_late = turn.now_secs - share.moved_at_secs >= STALL_SECS
            if host != self._host and is_late and share.done != share.ranks:
                self._take_over(host)
        if len(self.done) == target.part_count:
            self.committing = target.id
            turn.act(MirrorCommit(target.id, target.part_count))

    def next_at_secs(self, now_secs: float) -> float:
        """Return when a try begins or a host stalls, if no input comes before."""
        if self.target is None or self.committing is not None:
            return math.inf
        if now_secs < self._try_at_secs:
            return self._try_at_secs
        waiting = (share for host, share in (self._shares or {}).items() if host != self._host)
        stalls = (s.moved_at_secs + STALL_SECS for s in waiting if s.done != s.ranks)
        return min(stalls, default=math.inf)

    def _begin(self, target: MirrorTarget | None) -> None:
        """Replace what is under way; the first try of another checkpoint begins at once."""
        if self.target != target:
            self.target = target
            self._failures, self._try_at_secs = 0, 0.0
            self._assign_again()

    def _assign_again(self) -> None:
        self.round += 1
        self._shares = None
        self.is_changed = True

    def _assign(
        self, turn: Turn, target: MirrorTarget, ranks_by_host: Mapping[str, Collection[int]]
    ) -> None:
        left = set(range(target.part_count))
        self._shares = {}
        hosts: Iterable[str] = sorted(ranks_by_host.keys() - {self._host})
        if sum(len(ranks) for ranks in ranks_by_host.values()) > target.part_count:
            # The ranks of another plan say nothing about the parts of this checkpoint.
            hosts = ()
        for host in hosts:
            ranks = left.intersection(ranks_by_host[host])
            if ranks:
                left -= ranks
                self._shares[host] = _Share(ranks, turn.now_secs)
        self._shares[self._host] = _Share(left, turn.now_secs)
        self.is_changed = True

    def _take_over(self, host: str) -> None:
        """Write from this host what another one has not reported as written."""
        if self._shares is None or host not in self._shares:
            return
        share = self._shares[host]
        missing = share.ranks - share.done
        if missing:
            share.ranks -= missing
            self._shares[self._host].ranks |= missing
            self.is_changed = True

    def _failed(self, turn: Turn, reason: str) -> None:
        self._failures += 1
        pause_secs = PAUSE_SECS_MIN * 2 ** min(self._failures - 1, 10)
        self._try_at_secs = turn.now_secs + min(pause_secs, PAUSE_SECS_MAX)
        assert self.target is not None
        turn.act(MirrorEnded(self.target.id, reason=reason))
        self._assign_again()
        if self._next is not None:
            # A newer one is due: the failed one is not tried again.
            pause_until_secs = self._try_at_secs
            self._begin(self._next)
            self._next, self._failures = None, 1
            self._try_at_secs = pause_until_secs
