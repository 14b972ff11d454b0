"""The leader's table of the checkpoints of all hosts, and the verdict on each.

Invariants:
- A part is counted only for its own step and attempt.
- RAM of a checkpoint that was complete is released only for a newer checkpoint of the present
  attempt that was protected: each of its parts was in `required` failure domains, or durable.
- A successor, which does not know the RAM tier's policy, releases RAM of a committed checkpoint
  for a newer committed one.
- A checkpoint that is due keeps its RAM until it is committed or has failed.
- A due checkpoint on an abandoned branch is dropped as soon as the timeline is known.
- An open checkpoint is dropped only when it can never become complete: a rank has passed it or
  ended without its part, or a newer one is protected.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from holdfast.coordination.messages import DELETED, CheckpointStatus, CheckpointVerdict, Held
from holdfast.coordination.rank_runs import ranks_in
from holdfast.coordination.settings import OUTCOMES_MAX
from holdfast.format.names import NO_AGE, STEP_MAX, Age, AttemptId, CheckpointId, age_of


class Recycling(enum.Enum):
    """For which newer checkpoints a table may release RAM.

    A leader in the place of rank 0's host has `COMMITTED` for as long as it leads. Every other
    leader begins with `NOTHING`. When all ranks have reported, `NOTHING` becomes `ALL` if the
    timeline is known, else `FRESH`; when the timeline becomes known, `FRESH` becomes `ALL`.
    """

    COMMITTED = enum.auto()
    """Committed checkpoints, for newer committed ones."""
    NOTHING = enum.auto()
    """None: few failure domains would seem to be enough while ranks are missing."""
    FRESH = enum.auto()
    """Checkpoints that were begun after all ranks had reported: no other attempt can rely on them.
    A newer attempt may have begun, and may rely on older ones."""
    ALL = enum.auto()
    """Every checkpoint, for a newer one that was protected."""


@dataclass(slots=True)
class CheckpointEntry:
    """A checkpoint that the leader tracks.

    Attributes:
        holders: for each rank, the hosts whose RAM has its part, and whether it was made there.
        durable: the ranks whose part is durable; it only grows.
        missing: the ranks whose part is neither in RAM nor durable.
        exposed: the ranks whose part is in too few failure domains and not durable.
        thin: the ranks whose part is in the RAM of too few failure domains, durable or not.
        is_due: it must become durable.
        was_complete, was_protected: it was so once; later losses do not reset this.
        failure: why it could not be made durable; empty if it could, or may yet.
        dropped: why it was dropped; empty if it was not.
        round: how often writing it was restarted after it had failed.
        listing_awaited: the number of the listing that has to show that a part is missing; None if
            none is awaited.
        was_sought: a missing part of it has been looked for in storage, or will be soon.
        is_stale: the assignment of its copies and writes has to be computed again.
        failed_at_secs: when `failure` was set.
        incomplete_since_secs: since when parts of the complete checkpoint are lost; None if none.
        failures: the hosts that cannot write it in this round, and why.
        writes: the ranks whose part each host is ordered to write.
        pulls: the (rank, source host) that each host is ordered to pull.
    """

    id: CheckpointId
    part_count: int
    holders: dict[int, dict[str, bool]] = field(default_factory=dict)
    durable: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    exposed: set[int] = field(default_factory=set)
    thin: set[int] = field(default_factory=set)
    is_due: bool = False
    was_complete: bool = False
    was_protected: bool = False
    is_committed: bool = False
    failure: str = ""
    dropped: str = ""
    round: int = 0
    listing_awaited: int | None = None
    was_sought: bool = False
    is_stale: bool = True
    failed_at_secs: float = 0.0
    incomplete_since_secs: float | None = None
    failures: dict[str, str] = field(default_factory=dict)
    writes: dict[str, list[int]] = field(default_factory=dict)
    pulls: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing = set(range(self.part_count))
        self.exposed = set(range(self.part_count))
        self.thin = set(range(self.part_count))

    @property
    def age(self) -> Age:
        """The sort key of when checkpoints were taken."""
        return self.id.age

    @property
    def is_complete(self) -> bool:
        """Whether every part is in RAM or durable now."""
        return not self.missing

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        """Whether there is a part to copy, to protect, and to write; its orders follow from it."""
        return bool(self.thin), bool(self.exposed), len(self.durable) < self.part_count

    @property
    def is_open(self) -> bool:
        """Whether it may still become complete for the first time."""
        return not (self.was_complete or self.dropped or self.is_committed)

    @property
    def is_pending(self) -> bool:
        """Whether it must become durable, and has neither been committed nor failed nor dropped."""
        return self.is_due and not (self.is_committed or self.failure or self.dropped)

    @property
    def status(self) -> CheckpointStatus:
        """The status that is reported to the hosts."""
        if self.dropped:
            return CheckpointStatus.DROPPED
        if self.is_committed:
            return CheckpointStatus.COMMITTED
        if self.failure:
            return CheckpointStatus.FAILED
        if self.was_protected:
            return CheckpointStatus.PROTECTED
        return CheckpointStatus.COMPLETE if self.was_complete else CheckpointStatus.OPEN

    def update_rank(self, rank: int, required: int, domains: Mapping[str, str]) -> None:
        """Update `missing`, `thin` and `exposed` for one rank.

        Args:
            rank: the rank whose part is counted.
            required: the number of failure domains that protect a part; 0 if it is not known yet.
            domains: the failure domain of each host.
        """
        holders = self.holders.get(rank)
        is_durable = rank in self.durable
        if holders or is_durable:
            self.missing.discard(rank)
        else:
            self.missing.add(rank)
        copies = len({domains[host] for host in holders}) if holders else 0
        is_thin = not 0 < required <= copies
        for ranks, belongs in ((self.thin, is_thin), (self.exposed, is_thin and not is_durable)):
            if belongs:
                ranks.add(rank)
            else:
                ranks.discard(rank)


class CheckpointTable:
    """The entries of all checkpoints that hosts hold, by id.

    Attributes:
        attempt: the present attempt.
        limits: for each attempt on the timeline, the last step that counts.
        required: the number of failure domains that protect a part; 0 until all ranks were seen.
        recycling: what RAM may be released.
        knows_timeline: `limits` are complete, and no newer attempt can have been missed.
        domains: the failure domain of each host that has reported.
        is_changed: verdicts or orders may have changed since the leader reset this.
        changed_hosts: the hosts whose pulls or writes have changed since the leader reset this.
        status_changes: the new statuses that the leader has not reported yet.
        floor: the newest protected checkpoint of the present attempt; None if there is none.
    """

    def __init__(
        self,
        attempt: AttemptId,
        limits: Mapping[AttemptId, int],
        recycling: Recycling = Recycling.NOTHING,
        *,
        knows_timeline: bool = False,
    ) -> None:
        self.attempt = attempt
        self.limits = {**limits, attempt: STEP_MAX}
        self.required = 0
        self.recycling = recycling
        self.knows_timeline = knows_timeline
        # The highest step that a rank had published when all ranks had reported.
        self._fresh_above = STEP_MAX
        self.preserved: frozenset[CheckpointId] | None = None
        """The checkpoints that the RAM tier's policy keeps; None until it was evaluated."""
        self.domains: dict[str, str] = {}
        self.entries: dict[CheckpointId, CheckpointEntry] = {}
        self.is_changed = False
        self.changed_hosts: set[str] = set()
        self.status_changes: list[tuple[CheckpointEntry, CheckpointStatus]] = []
        self.floor: CheckpointId | None = None
        # From listings and commits. Entries are made only for checkpoints that a host holds.
        self._committed: set[CheckpointId] = set()
        self._newest_committed = NO_AGE
        self._durable: dict[CheckpointId, frozenset[int]] = {}
        # Verdicts on forgotten entries, and deleted checkpoints: both in order of insertion, so
        # that the oldest are forgotten first.
        self._outcomes: dict[CheckpointId, CheckpointVerdict] = {}
        self._deleted: dict[CheckpointId, None] = {}

    def __iter__(self) -> Iterator[CheckpointEntry]:
        return iter(sorted(self.entries.values(), key=lambda entry: entry.age))

    @property
    def deleted(self) -> Set[CheckpointId]:
        """The deleted checkpoints, the last `OUTCOMES_MAX` of them."""
        return self._deleted.keys()

    def on_timeline(self, checkpoint: CheckpointId) -> bool:
        """Return whether `checkpoint` is on the present timeline."""
        return checkpoint.step <= self.limits.get(checkpoint.attempt, -1)

    # What the leader learns.

    def set_required(self, required: int, highest_step: int) -> None:
        """Set the number of failure domains that protect a part: all ranks have reported.

        Args:
            required: the number, at least 1.
            highest_step: the highest step that a rank has published.
        """
        self.required, self._fresh_above = required, highest_step
        if self.recycling is Recycling.NOTHING:
            self.recycling = Recycling.ALL if self.knows_timeline else Recycling.FRESH
        for entry in self.entries.values():
            for rank in range(entry.part_count):
                entry.update_rank(rank, required, self.domains)
            entry.is_stale = True
            self._advance(entry)
        self.is_changed = True

    def complete_timeline(self, limits: Mapping[AttemptId, int]) -> None:
        """Add the limits of earlier attempts: storage shows that no newer attempt has begun."""
        self.limits.update(limits)
        self.knows_timeline = True
        if self.recycling is Recycling.FRESH:
            self.recycling = Recycling.ALL
        self.is_changed = True

    # What hosts hold.

    def apply_report(
        self, host: str, old: Mapping[CheckpointId, Held], new: Mapping[CheckpointId, Held]
    ) -> None:
        """Replace what `host` held, `old`, by what it holds now, `new`."""
        for checkpoint in {**old, **new}:
            before, after = old.get(checkpoint), new.get(checkpoint)
            if before == after:
                continue
            entry = self._entry_for(after) if after is not None else self.entries.get(checkpoint)
            if entry is not None:
                self._apply(entry, host, before, after)

    def list_durable(
        self, committed: Iterable[CheckpointId], parts: Mapping[CheckpointId, frozenset[int]]
    ) -> None:
        """Apply a listing of the durable tier: its committed checkpoints and its parts."""
        self._add_committed(committed)
        self._durable.update(parts)
        for entry in self.entries.values():
            self._take_durable(entry)

    @property
    def newest_committed(self) -> CheckpointId | None:
        """The newest committed checkpoint on the timeline, whether or not any host holds it."""
        attempt, step = self._newest_committed
        return CheckpointId(step, attempt) if step >= 0 else None

    # What becomes of them.

    def newest_complete(self) -> CheckpointEntry | None:
        """Return the newest checkpoint on the timeline that is complete or committed now.

        Returns:
            None if there is none, or if a newer one is committed that no host holds.
        """
        whole = [
            e
            for e in self.entries.values()
            if (e.is_complete or e.is_committed) and not e.dropped and self.on_timeline(e.id)
        ]
        newest = max(whole, key=lambda e: e.age, default=None)
        if newest is not None and self._newest_committed > newest.age:
            return None
        return newest

    def open_entries(self) -> list[CheckpointEntry]:
        """Return the checkpoints of the present attempt that may still become complete."""
        return [e for e in self.entries.values() if e.is_open and e.id.attempt == self.attempt]

    def pending(self) -> list[CheckpointEntry]:
        """Return the complete checkpoints on their way to the durable tier, the oldest first."""
        return [e for e in self if e.is_pending and e.was_complete and self.on_timeline(e.id)]

    def drop(self, entry: CheckpointEntry, reason: str) -> None:
        """Drop a checkpoint: it can never become complete, or its attempt no longer counts."""
        entry.dropped = reason
        self._record_status(entry, CheckpointStatus.DROPPED)

    def delete(self, checkpoint: CheckpointId) -> None:
        """Drop a checkpoint that was deleted; the newest one left keeps its RAM from now on."""
        if checkpoint in self._deleted:
            return
        self._deleted[checkpoint] = None
        while len(self._deleted) > OUTCOMES_MAX:
            del self._deleted[next(iter(self._deleted))]
        self._committed.discard(checkpoint)
        on_timeline = [c.age for c in self._committed if self.on_timeline(c)]
        self._newest_committed = max(on_timeline, default=NO_AGE)
        entry = self.entries.get(checkpoint)
        if entry is not None:
            self.drop(entry, DELETED)
        else:
            # A silent host may still hold it, and needs the verdict when it reports.
            self._remember(CheckpointVerdict(checkpoint, CheckpointStatus.DROPPED, True, DELETED))
        left = [
            e.id
            for e in self.entries.values()
            if e.was_protected and not e.dropped and e.id.attempt == self.attempt
        ]
        self.floor = max(left, key=age_of, default=None)

    def commit(self, entry: CheckpointEntry) -> None:
        """Note that the manifest of a checkpoint is written."""
        entry.is_committed, entry.failure = True, ""
        self._add_committed((entry.id,))
        for rank in range(entry.part_count):
            entry.durable.add(rank)
            entry.update_rank(rank, self.required, self.domains)
        self._advance(entry)
        self._record_status(entry, CheckpointStatus.COMMITTED)

    def mark_failed(self, entry: CheckpointEntry, reason: str, now_secs: float) -> None:
        """Note that a checkpoint cannot be made durable."""
        entry.failure, entry.failed_at_secs = reason, now_secs
        self._record_status(entry, CheckpointStatus.FAILED)

    def settle(self) -> None:
        """Drop the checkpoints that were overtaken, and forget those that no host holds."""
        if self.knows_timeline:
            # These can never be committed. The drop notifies the ranks that wait for it, and the
            # checkpoint no longer counts as pending.
            for entry in list(self.entries.values()):
                if entry.is_pending and not self.on_timeline(entry.id):
                    self.drop(entry, "it is on an abandoned branch")
        floor = self.floor
        if floor is not None:
            for entry in list(self.entries.values()):
                is_past = entry.age < age_of(floor) and self._may_recycle(entry)
                if is_past and entry.is_open:
                    self.drop(entry, f"a newer checkpoint, {floor}, is complete")
        for entry in list(self.entries.values()):
            # The newest one, or a preserved one, that no host holds now may come back with hosts
            # that were cut off.
            is_past = entry.age < age_of(floor) and not self._is_preserved(entry)
            # A forgotten checkpoint may be released by a silent host that still holds it. So it is
            # forgotten only if that is allowed: an open one was dropped above, and a leader that
            # may not recycle does not forget.
            is_past &= self._may_recycle(entry)
            is_past |= bool(entry.dropped) or self._is_superseded(entry)
            # A due one is remembered until it has failed, because its hosts may come back.
            if is_past and not any(entry.holders.values()) and not entry.is_pending:
                self._forget(entry)

    def verdict(self, checkpoint: CheckpointId) -> CheckpointVerdict:
        """Return the verdict for the hosts that hold `checkpoint`."""
        entry = self.entries.get(checkpoint)
        if entry is None:
            outcome = self._outcomes.get(checkpoint)
            return outcome or CheckpointVerdict(
                checkpoint, CheckpointStatus.DROPPED, True, "the leader does not know it any more"
            )
        reason = entry.dropped or entry.failure
        return CheckpointVerdict(checkpoint, entry.status, self._may_release(entry), reason)

    def _may_release(self, entry: CheckpointEntry) -> bool:
        if entry.dropped or self._is_superseded(entry):
            return True
        if self.floor is None or not self._may_recycle(entry) or entry.age >= age_of(self.floor):
            return False
        return not (self._is_preserved(entry) or entry.is_pending)

    def _is_superseded(self, entry: CheckpointEntry) -> bool:
        """Return whether a successor may release it: it and a newer one are committed.

        So RAM stays bounded while rank 0's host is silent. Nothing is lost: both are durable.
        """
        is_committed = entry.is_committed and self.on_timeline(entry.id)
        is_old = is_committed and entry.age < self._newest_committed
        return is_old and self.recycling is Recycling.COMMITTED

    def _may_recycle(self, entry: CheckpointEntry) -> bool:
        if self.recycling is not Recycling.FRESH:
            return self.recycling is Recycling.ALL
        return entry.id.attempt == self.attempt and entry.id.step > self._fresh_above

    def _is_preserved(self, entry: CheckpointEntry) -> bool:
        if self.preserved is None:
            # A restarted leader does not know yet what the policy keeps.
            return True
        return entry.id in self.preserved and self.on_timeline(entry.id)

    def _add_committed(self, checkpoints: Iterable[CheckpointId]) -> None:
        for checkpoint in checkpoints:
            if checkpoint in self._deleted:
                # The listing was begun before the delete.
                continue
            self._committed.add(checkpoint)
            if self.on_timeline(checkpoint):
                self._newest_committed = max(self._newest_committed, checkpoint.age)

    def _entry_for(self, held: Held) -> CheckpointEntry | None:
        entry = self.entries.get(held.id)
        if entry is None and held.id not in self._outcomes:
            entry = self.entries[held.id] = CheckpointEntry(held.id, held.part_count)
            self._take_durable(entry)
        if entry is not None and entry.part_count != held.part_count:
            # Ranks have used two plans for one step; parts of two plans must not be combined.
            if not entry.dropped:
                counts = f"{entry.part_count} and of {held.part_count}"
                self.drop(entry, f"ranks made it of {counts} parts")
            return None
        return entry

    def _apply(
        self, entry: CheckpointEntry, host: str, before: Held | None, after: Held | None
    ) -> None:
        had = _parts(before)
        has = _parts(after)
        for rank in had.keys() - has.keys():
            entry.is_stale = True
            entry.holders.get(rank, {}).pop(host, None)
        for rank, is_own in has.items():
            entry.holders.setdefault(rank, {})[host] = is_own
        # Counting a rank is the costly step, so only the ranks that have changed are counted.
        touched = set(had) ^ set(has)
        if after is not None:
            written = set(ranks_in(after.written))
            touched |= written - entry.durable
            entry.durable |= written
            entry.is_stale |= after.is_due and not entry.is_due
            entry.is_due |= after.is_due
            self._apply_failures(entry, host, after)
        before_touched = entry.needs
        for rank in touched:
            entry.update_rank(rank, self.required, self.domains)
        if touched:
            # Each host reports its own progress: what the others are to do stays the same.
            entry.is_stale |= entry.needs != before_touched
            self._advance(entry)

    def _apply_failures(self, entry: CheckpointEntry, host: str, held: Held) -> None:
        if held.abandoned and entry.is_open:
            self.drop(entry, held.abandoned)
        if held.round > entry.round:
            # A previous leader has restarted the write more often.
            entry.round, entry.is_stale = held.round, True
            entry.failures.clear()
        if held.failure and held.round == entry.round:
            if entry.failures.get(host) != held.failure:
                entry.failures[host] = held.failure
                entry.is_stale = True
        elif entry.failures.pop(host, None) is not None:
            entry.is_stale = True

    def _take_durable(self, entry: CheckpointEntry) -> None:
        ranks = self._durable.get(entry.id, frozenset()) - entry.durable
        entry.durable |= ranks
        for rank in ranks:
            entry.update_rank(rank, self.required, self.domains)
        if ranks:
            entry.is_stale = True
            self._advance(entry)
        if entry.id in self._committed and not entry.is_committed:
            self.commit(entry)

    def _advance(self, entry: CheckpointEntry) -> None:
        if entry.dropped:
            return
        if entry.is_complete and not entry.was_complete:
            entry.was_complete = True
            self._record_status(entry, CheckpointStatus.COMPLETE)
        if self.required and entry.was_complete and not entry.exposed and not entry.was_protected:
            entry.was_protected = True
            if entry.id.attempt == self.attempt and entry.age > age_of(self.floor):
                self.floor = entry.id
            self._record_status(entry, CheckpointStatus.PROTECTED)

    def _record_status(self, entry: CheckpointEntry, status: CheckpointStatus) -> None:
        entry.is_stale = True
        self.status_changes.append((entry, status))
        self.is_changed = True

    def _forget(self, entry: CheckpointEntry) -> None:
        del self.entries[entry.id]
        reason = entry.dropped or entry.failure
        self._remember(CheckpointVerdict(entry.id, entry.status, True, reason))
        self.is_changed = True

    def _remember(self, verdict: CheckpointVerdict) -> None:
        self._outcomes[verdict.id] = verdict
        while len(self._outcomes) > OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]


def _parts(held: Held | None) -> dict[int, bool]:
    """Return the ranks whose part is in the host's RAM, and whether it was made there."""
    if held is None:
        return {}
    replicas = dict.fromkeys(ranks_in(held.replicas), False)
    return replicas | dict.fromkeys(ranks_in(held.own), True)
