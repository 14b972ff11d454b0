"""The trainers of one host: those of the present attempt, and those that want to begin one."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.coordination.inputs import Found, RankJoined
from holdfast.coordination.turn import Channel
from holdfast.format.names import CheckpointId


@dataclass(slots=True)
class RankGroup:
    """Trainers that belong together; `begun` and `sealed` are the ranks' last steps.

    `attempt` is 0 until it has begun. `ranks` live and are attached; those that were here `left` in
    good order or are `lost`. Of those on other hosts that ended the trainers here were told.
    `offers` are the ranks of whose parts a rank here makes copies itself. By `hello` the leader is
    told of them until the attempt has begun. `hosts` are those of all ranks, where known.
    """

    token: str
    rank_count: int
    leader: str
    attempt: int = 0
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
        """All parts of others of which copies are made here."""
        return frozenset().union(*self.offers.values())

    @property
    def is_living(self) -> bool:
        """Whether it can go on: its ranks live, and none was lost."""
        return bool(self.ranks) and not self.is_broken

    def begin(self, attempt: int, origin: CheckpointId | None) -> None:
        """Its attempt has begun, or a branch of it."""
        self.attempt, self.origin = attempt, origin
        self.begun.clear()
        self.sealed.clear()


def joined_group(item: RankJoined, now_secs: float) -> RankGroup:
    """The group that a first trainer brings."""
    return RankGroup(
        item.group,
        item.rank_count,
        item.leader,
        takeover=item.takeover,
        hosts=item.hosts,
        since_secs=now_secs,
    )


def found_group(found: Found) -> RankGroup | None:
    """The group whose trainers an agent finds alive when it starts."""
    if not found.group or not found.ranks:
        return None
    group = RankGroup(found.group, found.rank_count, found.leader, found.attempt, found.origin)
    group.ranks, group.is_broken = set(found.ranks), found.is_broken
    group.lost = set(found.lost)
    return group
