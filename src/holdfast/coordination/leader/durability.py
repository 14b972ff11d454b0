"""The leader's orders for complete checkpoints: replicas in other domains, writes, commits.

Invariants:
- Nothing is written before storage was listed, so that durable parts are not written again; after
  `TRIES_MAX` failed listings writes are allowed.
- One commit is under way at a time, the oldest first.
- A host that fails `TRIES_MAX` times is replaced by another holder of the part; if all have failed,
  the checkpoint has failed. Without all ranks the newest complete checkpoint is tried again, for
  as long as its agents live.
- While a host is silent, parts of due checkpoints are written before these are complete: the silent
  host may write its parts too, and the RAM of both may be lost before they can report them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from holdfast.coordination.effects import Commit, ListDurable
from holdfast.coordination.inputs import CommitFailed
from holdfast.coordination.leader.checkpoint_table import CheckpointEntry, CheckpointTable
from holdfast.coordination.leader.replica_placement import Ring, assign_pulls
from holdfast.coordination.settings import TRIES_MAX, Settings
from holdfast.coordination.turn import Turn
from holdfast.format.names import STEP_MAX, CheckpointId


class Durability:
    """Assigns pulls and writes to hosts, commits, and lists the durable tier, for one leader.

    Args:
        settings: the options of the run.
        table: the checkpoints.
        make_ring: returns the ring of the hosts that live.
    """

    def __init__(
        self, settings: Settings, table: CheckpointTable, make_ring: Callable[[], Ring]
    ) -> None:
        self._settings = settings
        self._table = table
        self.committing: CheckpointId | None = None
        """The checkpoint whose manifest is being written; None if there is none."""
        self._tries = 0
        self._commit_at_secs = 0.0
        self._is_listing = False
        self._list_at_secs = 0.0
        self._listed_at_secs = 0.0
        # A listing that the end of a save waits for; one that is under way does not count as it.
        self._list_soon_at_secs = math.inf
        # The pause before the next listing that looks for missing parts.
        self._seek_secs = settings.storage_retry_secs
        self._has_listed = False
        self._listing_failures = 0
        # Listings are numbered in the order in which they begin; one is under way at a time.
        self._newest_listing = self._newest_success = 0
        # Writes wait for the first listing, so that durable parts are not written again.
        self._may_write = False
        self._make_ring = make_ring
        self._ring: Ring | None = None
        """Made when it is needed, since it visits all hosts."""

    @property
    def is_settled(self) -> bool:
        """Whether no checkpoint is pending, and the newest complete one is committed."""
        newest = self._table.newest_complete()
        is_safe = newest is None or newest.is_committed
        return self._has_listed and is_safe and not self._table.pending()

    def listed(self, turn: Turn) -> None:
        """Note that the durable tier was listed."""
        self._is_listing, self._has_listed = False, True
        self._newest_success = self._newest_listing
        self._allow_writes()
        self._listed_at_secs = turn.now_secs
        self._list_at_secs = turn.now_secs + self._settings.lost_secs

    def has_looked_for(self, entry: CheckpointEntry) -> bool:
        """Return whether storage has been listed for a missing part since the first call.

        While hosts were cut off, the part may have been written by a host that was lost since. If
        listings fail, some of them are enough.
        """
        if not entry.is_due:
            return True
        if entry.listing_awaited is None:
            entry.listing_awaited = self._newest_listing + 1
            self._list_soon(self._listed_at_secs)
        has_failed = self._newest_listing >= entry.listing_awaited + TRIES_MAX
        return self._newest_success >= entry.listing_awaited or has_failed

    def listing_failed(self, turn: Turn) -> None:
        """Schedule the next try of a failed listing."""
        self._is_listing = False
        self._list_at_secs = turn.now_secs + self._settings.storage_retry_secs
        self._listing_failures += 1
        if self._listing_failures == TRIES_MAX:
            # Saves must end also when storage does not respond: the writes fail, and so do they.
            self._allow_writes()

    def committed(self, checkpoint: CheckpointId) -> None:
        """Note that a manifest is written."""
        self.committing, self._tries = None, 0
        self._table.is_changed = True
        entry = self._table.entries.get(checkpoint)
        if entry is not None:
            self._table.commit(entry)

    def commit_failed(self, turn: Turn, item: CommitFailed) -> None:
        """Schedule the next try of a commit that has failed or whose result is unknown.

        After `TRIES_MAX` tries, or if a newer attempt forbids it, the checkpoint has failed. Those
        that wait behind it then get one try each, without a pause; the newest one gets all tries.
        """
        self.committing = None
        self._table.is_changed = True
        # One counter is enough: only one commit is under way, and a success resets it.
        self._tries += 1
        self._commit_at_secs = turn.now_secs + self._settings.storage_retry_secs
        entry = self._table.entries.get(item.id)
        if entry is not None and (self._tries >= TRIES_MAX or item.newer_attempt):
            self._table.mark_failed(entry, item.reason, turn.now_secs)
            waiting = sum(1 for _ in self._durable_pending())
            if waiting:
                self._commit_at_secs = turn.now_secs
            if waiting <= 1:
                self._tries = 0

    def forget_ring(self) -> None:
        """Note that hosts joined or were lost: the next orders need another ring."""
        self._ring = None

    def place_replicas(self) -> None:
        """Assign all pulls and writes again."""
        for entry in self._table.entries.values():
            entry.is_stale = True

    def run_due(self, turn: Turn, *, is_whole: bool) -> None:
        """List storage, assign the pulls and writes that have changed, and commit.

        Args:
            turn: the present turn.
            is_whole: all ranks of the attempt live.
        """
        if not self._has_listed or (not is_whole and self._seek_missing(turn)):
            self._list(turn)
        if not is_whole and self._has_listed:
            self._want_newest(turn)
        for entry in list(self._table.entries.values()):
            # An incomplete entry is checked each time, because its wait for lost hosts is bounded.
            if entry.is_stale or entry.missing:
                entry.is_stale = False
                self._order_pulls(entry)
                self._order_writes(turn, entry, is_whole)
        self._commit(turn)

    def next_at_secs(self, now_secs: float) -> float:
        """Return when a commit or listing is due again; infinity if none is."""
        times = (self._commit_at_secs, self._list_at_secs, self._list_soon_at_secs)
        return min((at_secs for at_secs in times if at_secs > now_secs), default=math.inf)

    def _allow_writes(self) -> None:
        if not self._may_write:
            self._may_write = True
            for entry in self._table.entries.values():
                entry.is_stale = True

    def _seek_missing(self, turn: Turn) -> bool:
        """Return whether a due part is missing that a silent host may have made durable.

        Storage is listed for it soon, when the other hosts have had time to write their parts, then
        after pauses that double up to the pace of all listings. The end of a save may wait for it.
        """
        missed = [e for e in self._table.entries.values() if e.is_pending and e.missing]
        for entry in missed:
            if not entry.was_sought:
                entry.was_sought = True
                self._seek_secs = self._settings.storage_retry_secs
        if missed and not self._is_listing and self._list_soon_at_secs == math.inf:
            self._list_soon_at_secs = turn.now_secs + self._seek_secs
            self._seek_secs = min(2 * self._seek_secs, self._settings.lost_secs)
        return bool(missed)

    def _list_soon(self, after_secs: float) -> None:
        """Schedule a listing shortly after that time: the end of a save waits for it."""
        soon_secs = after_secs + self._settings.storage_retry_secs
        self._list_soon_at_secs = min(self._list_soon_at_secs, soon_secs)

    def _list(self, turn: Turn) -> None:
        due_at_secs = min(self._list_at_secs, self._list_soon_at_secs)
        if not self._is_listing and turn.now_secs >= due_at_secs:
            self._is_listing = True
            self._list_soon_at_secs = math.inf
            self._newest_listing += 1
            unknown = (e.id.step for e in self._table.entries.values() if not e.is_committed)
            since_step = min(unknown, default=STEP_MAX)
            turn.act(ListDurable(self._table.attempt, since_step))

    def _want_newest(self, turn: Turn) -> None:
        """Make the newest complete checkpoint due: without all ranks, RAM may soon be released."""
        newest = self._table.newest_complete()
        if newest is None or newest.is_committed:
            return
        if not newest.is_due:
            newest.is_due = newest.is_stale = True
            self._table.is_changed = True
        retry_at_secs = newest.failed_at_secs + self._settings.storage_retry_secs
        # A new round clears the hosts' failures: they write again when they see its number.
        if newest.failure and turn.now_secs >= retry_at_secs:
            newest.failure = ""
            newest.round += 1
            newest.failures.clear()
            newest.is_stale = True
            self._table.is_changed = True

    def _order_pulls(self, entry: CheckpointEntry) -> None:
        required = self._table.required
        is_wanted = entry.was_complete and entry.is_complete and entry.thin and not entry.dropped
        # Only the newest complete checkpoint, of whichever attempt, is worth copying: a restart
        # continues from it.
        newest = self._table.newest_complete()
        is_newest = newest is None or entry.age >= newest.age
        pulls: dict[str, list[tuple[int, str]]] = {}
        if is_wanted and is_newest and required > 1:
            if self._ring is None:
                self._ring = self._make_ring()
            pulls = assign_pulls(
                {rank: _own_first(entry, rank) for rank in entry.thin},
                entry.thin,
                required,
                self._ring,
            )
        if pulls != entry.pulls:
            self._table.changed_hosts |= _differing(entry.pulls, pulls)
            entry.pulls = pulls

    def _order_writes(self, turn: Turn, entry: CheckpointEntry, is_whole: bool) -> None:
        writes: dict[str, list[int]] = {}
        # Before a listing it is unknown which parts a previous agent has made durable.
        is_wanted = entry.is_pending and self._may_write and self._table.on_timeline(entry.id)
        if is_wanted and entry.is_open:
            if not is_whole and entry.id.attempt == self._table.attempt:
                writes = _writes_of_known_parts(entry)
        elif is_wanted and not entry.is_complete:
            # A partial write is useless: without the lost parts there can be no commit.
            self._wait_for_lost(turn, entry)
        elif is_wanted:
            entry.incomplete_since_secs = None
            for rank in range(entry.part_count):
                if rank in entry.durable:
                    continue
                able = [h for h in _own_first(entry, rank) if h not in entry.failures]
                if not able:
                    # Every holder has failed in this round, so the checkpoint has failed.
                    self._table.mark_failed(
                        entry, next(iter(entry.failures.values())), turn.now_secs
                    )
                    writes = {}
                    break
                writes.setdefault(able[0], []).append(rank)
        if writes != entry.writes:
            self._table.changed_hosts |= _differing(entry.writes, writes)
            entry.writes = writes

    def _wait_for_lost(self, turn: Turn, entry: CheckpointEntry) -> None:
        """Fail a checkpoint whose lost parts have not come back with their hosts in time."""
        if entry.incomplete_since_secs is None:
            entry.incomplete_since_secs = turn.now_secs
        elif turn.now_secs - entry.incomplete_since_secs >= 2 * self._settings.lost_secs:
            ranks = sorted(entry.missing)[:8]
            reason = f"the parts of ranks {ranks} were lost with their hosts"
            self._table.mark_failed(entry, reason, turn.now_secs)

    def _commit(self, turn: Turn) -> None:
        if self.committing is not None or turn.now_secs < self._commit_at_secs:
            return
        entry = next(self._durable_pending(), None)
        if entry is not None:
            self.committing = entry.id
            turn.act(Commit(entry.id, entry.part_count))

    def _durable_pending(self) -> Iterator[CheckpointEntry]:
        """Yield the pending checkpoints whose parts are durable, the oldest first."""
        for entry in self._table.pending():
            if len(entry.durable) == entry.part_count:
                yield entry


def _differing(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    """Return the hosts whose orders differ."""
    return {host for host in before.keys() | now.keys() if before.get(host) != now.get(host)}


def _writes_of_known_parts(entry: CheckpointEntry) -> dict[str, list[int]]:
    """Return, for each host, the ranks whose part of an open checkpoint it can write."""
    writes: dict[str, list[int]] = {}
    for rank in range(entry.part_count):
        able = [host for host in _own_first(entry, rank) if host not in entry.failures]
        if able and rank not in entry.durable:
            writes.setdefault(able[0], []).append(rank)
    return writes


def _own_first(entry: CheckpointEntry, rank: int) -> list[str]:
    """Return the hosts that hold a part, the one that made it first."""
    holders = entry.holders.get(rank, {})
    return sorted(holders, key=lambda host: (not holders[host], host))
