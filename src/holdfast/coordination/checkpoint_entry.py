"""One checkpoint as its leader knows it: which part stands where, and how far that brings it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.coordination.messages import CheckpointStatus
from holdfast.format.names import CheckpointId


@dataclass(slots=True)
class CheckpointEntry:
    """A checkpoint in the leader's care.

    Attributes:
        holders: for each rank the hosts whose RAM has its part, and whether it was made there.
        durable: the ranks whose part is durable; it only grows.
        missing: the ranks whose part stands nowhere; `exposed`: in too few failure domains, and it
            is not durable; `thin`: in the RAM of too few, be it durable or not.
        was_complete, was_protected: once so; what is lost later does not undo it.
        round: how often its way to the durable tier was begun anew.
        is_stale: who copies and who writes its parts is to be decided anew.
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
    def age(self) -> tuple[int, int]:
        """An order of when checkpoints were taken: by attempt, then step."""
        return self.id.attempt, self.id.step

    @property
    def is_complete(self) -> bool:
        """Whether every part stands somewhere now."""
        return not self.missing

    @property
    def is_open(self) -> bool:
        """Whether it is still to become complete."""
        return not (self.was_complete or self.dropped or self.is_committed)

    @property
    def is_pending(self) -> bool:
        """Whether it is to become durable, and nothing has decided that it will not."""
        return self.is_due and not (self.is_committed or self.failure or self.dropped)

    @property
    def status(self) -> CheckpointStatus:
        """How far it has come."""
        if self.dropped:
            return CheckpointStatus.DROPPED
        if self.is_committed:
            return CheckpointStatus.COMMITTED
        if self.failure:
            return CheckpointStatus.FAILED
        if self.was_protected:
            return CheckpointStatus.PROTECTED
        return CheckpointStatus.COMPLETE if self.was_complete else CheckpointStatus.OPEN

    def count(self, rank: int, required: int, domains: Mapping[str, str]) -> None:
        """Counts one rank's copies anew; `required` domains protect a part, 0 where unknown."""
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
