"""The trainers of one host: those of the present attempt, and those whose attempt has not begun."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.coordination.inputs import Found, RankJoined
from holdfast.coordination.turn import Channel
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId


@dataclass(slots=True)
class RankGroup:
    """The trainers of one start on this host.

    Attributes:
        token: the random token that all ranks of the start share.
        attempt: `NO_ATTEMPT` until it has begun.
        ranks: the ranks that live and are attached here.
        is_broken: a rank here was lost.
        hosts: the hosts of all ranks, as far as known.
        begun, sealed: the last step of each rank whose part was begun, or sealed or abandoned.
        offers: for each rank here, the ranks whose parts it copies from bytes of its own.
        left, lost: the ranks that ended here, after detaching or without.
        notified_ended: the ended ranks of other hosts of which the ranks here were notified.
        hello: the reports to rank 0's host until the attempt has begun.
    """

    token: str
    rank_count: int
    leader: str
    attempt: AttemptId = NO_ATTEMPT
    origin: CheckpointId | None = None
    ranks: set[int] = field(default_factory=set)
    is_broken: bool = False
    takeover: bool = False
    hosts: tuple[str, ...] = ()
    since_secs: float = 0.0
    begun: dict[int, int] = field(default_factory=dict)
    sealed: dict[int, int] = field(default_factory=dict)
    offers: dict[int, frozenset[int]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    notified_ended: set[int] = field(default_factory=set)
    hello: Channel = field(default_factory=Channel)

    @property
    def offered(self) -> frozenset[int]:
        """The ranks whose parts the ranks here copy from bytes of their own."""
        return frozenset().union(*self.offers.values())

    @property
    def is_living(self) -> bool:
        """Whether the group can continue: ranks live here, and none was lost."""
        return bool(self.ranks) and not self.is_broken

    def holds(self, attempt: AttemptId) -> bool:
        """Return whether the group is of that attempt, and can continue."""
        return self.attempt == attempt and self.is_living

    def begin(self, attempt: AttemptId, origin: CheckpointId | None) -> None:
        """Enter an attempt that has begun, or a branch of the previous one."""
        self.attempt, self.origin = attempt, origin
        self.begun.clear()
        self.sealed.clear()


def joined_group(item: RankJoined, now_secs: float) -> RankGroup:
    """Return the group of the first trainer of a start that attaches."""
    return RankGroup(
        item.group,
        item.rank_count,
        item.leader,
        takeover=item.takeover,
        hosts=item.hosts,
        since_secs=now_secs,
    )


def found_group(found: Found) -> RankGroup | None:
    """Return the group whose trainers an agent finds alive when it starts; None if none live."""
    if not found.group or not found.ranks:
        return None
    group = RankGroup(found.group, found.rank_count, found.leader, found.attempt, found.origin)
    group.ranks, group.is_broken = set(found.ranks), found.is_broken
    group.lost = set(found.lost)
    return group
