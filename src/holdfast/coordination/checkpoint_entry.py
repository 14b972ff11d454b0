"""One checkpoint as its leader knows it: the holders of each part, and the status that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.coordination.messages import CheckpointStatus
from holdfast.format.names import Age, CheckpointId


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
