"""What a host's machine is told: what happened here, the outcomes of its effects, and messages.

Each is told once, in the order in which it happened; what was told to a machine that is gone is
told to the next one as what it finds (`Found`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.coordination.effects import BeginAttempt
from holdfast.coordination.messages import NO_STEP, AnyMessage, TargetKind
from holdfast.format.names import CheckpointId

NO_RANK_BEHIND = 1 << 62


@dataclass(frozen=True, slots=True)
class Published:
    """The steps that this host's living ranks have published, read just now.

    Attributes:
        highest: -1 where none has published.
        lowest: above all steps where no rank lives.
        save_cost_secs: the training time that a checkpoint costs the dearest of them; None until
            one knows.
    """

    highest: int = NO_STEP
    lowest: int = NO_RANK_BEHIND
    save_cost_secs: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What a listing shows of one checkpoint: the ranks whose part is whole, of how many."""

    part_count: int
    ranks: frozenset[int]

    @property
    def is_whole(self) -> bool:
        """Whether every rank's part is there."""
        return len(self.ranks) == self.part_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an agent that has just started finds: its RAM, and the trainers that live on.

    Attributes:
        replicas: for each checkpoint in RAM, the ranks whose part came from another host.
        targets: what the words say; `confirmed`: whether the preemption's may be stopped at.
        leader: the host of rank 0; empty where no trainers live.
        lost: the ranks here that ended without a word.
        due: checkpoints that a trainer still waits for until they are durable.
        attempt, group, leader, successors, origin: as `AttemptJoined` and `Following` told them
            last; they are kept while no trainer lives, too.
        ended_attempt: the newest attempt of which a rank has ended here.
    """

    ram: Mapping[CheckpointId, Listed] = field(default_factory=dict)
    replicas: Mapping[CheckpointId, frozenset[int]] = field(default_factory=dict)
    due: frozenset[CheckpointId] = frozenset()
    attempt: int = 0
    group: str = ""
    rank_count: int = 0
    ranks: frozenset[int] = frozenset()
    is_broken: bool = False
    lost: frozenset[int] = frozenset()
    leader: str = ""
    successors: tuple[str, ...] = ()
    origin: CheckpointId | None = None
    targets: Mapping[TargetKind, int] = field(default_factory=dict)
    is_confirmed: bool = False
    ended_attempt: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from `sender`."""

    sender: str
    message: AnyMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A trainer is attached. `leader` is rank 0's host; all ranks of a start have one `group`.

    `hosts` are those of all ranks, as far as they are known.
    """

    group: str
    rank: int
    rank_count: int
    leader: str
    takeover: bool = False
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A trainer left in good order."""

    group: str
    rank: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """A trainer ended without a word."""

    group: str
    rank: int


@dataclass(frozen=True, slots=True)
class PartBegun:
    """A rank has read its target and takes a checkpoint."""

    rank: int
    id: CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSealed:
    """A rank's part is whole, in RAM or in the durable tier. `is_due`: it is to become durable."""

    rank: int
    id: CheckpointId
    part_count: int
    in_ram: bool
    is_due: bool


@dataclass(frozen=True, slots=True)
class PartAbandoned:
    """A rank could not make its part."""

    rank: int
    id: CheckpointId
    part_count: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopiesOffered:
    """At each checkpoint a rank puts copies of these ranks' parts into this host's RAM by itself.

    It holds the same bytes as they do. Told anew where that changes.
    """

    rank: int
    parts: frozenset[int]


@dataclass(frozen=True, slots=True)
class Wish:
    """Somebody here wants a checkpoint soon: a policy, a person, a notice to stop."""

    kind: TargetKind


@dataclass(frozen=True, slots=True)
class BranchWanted:
    """The ranks of `attempt` have gone back to `origin`."""

    attempt: int
    origin: CheckpointId | None


@dataclass(frozen=True, slots=True)
class TargetWritten:
    """The word was written, and after that `highest` was read."""

    kind: TargetKind
    step: int
    highest: int


@dataclass(frozen=True, slots=True)
class ReplicaSealed:
    """A copy of another host's part stands in RAM here: pulled, or made by a rank that has it."""

    id: CheckpointId
    rank: int
    part_count: int


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A part could not be pulled."""

    id: CheckpointId
    rank: int


@dataclass(frozen=True, slots=True)
class PartsWritten:
    """These parts are durable."""

    id: CheckpointId
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Parts could not be made durable. `newer_attempt`: 0, or the attempt that forbids it."""

    id: CheckpointId
    reason: str
    newer_attempt: int = 0


@dataclass(frozen=True, slots=True)
class CommitWritten:
    """The manifest stands."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The manifest may or may not stand. `newer_attempt`: 0, or the attempt that forbids it."""

    id: CheckpointId
    reason: str
    newer_attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableListed:
    """What the durable tier holds.

    Attributes:
        newest_attempt: 0 where there was none; `leader`: the host that began it.
        limits: for each attempt on its timeline, the last step that counts.
    """

    newest_attempt: int
    leader: str
    limits: Mapping[int, int]
    committed: frozenset[CheckpointId]
    parts: Mapping[CheckpointId, Listed]


@dataclass(frozen=True, slots=True)
class ListingFailed:
    """The durable tier could not be listed."""

    reason: str


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """The attempt's record was put, where there was none."""

    asked: BeginAttempt


@dataclass(frozen=True, slots=True)
class AttemptTaken:
    """Somebody else has that number."""

    asked: BeginAttempt


@dataclass(frozen=True, slots=True)
class BeginFailed:
    """Storage refused; whether the record stands is not known."""

    asked: BeginAttempt
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseWritten:
    """The lease was renewed or released, or could not be."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSeen:
    """A lease as it was read.

    Attributes:
        host, pid: of the trainer that the lease is for.
        stamp: differs after each renewal.
        age_secs: since the last renewal, by the clock of the file system alone.
    """

    host: str
    pid: int
    stamp: str
    age_secs: float


@dataclass(frozen=True, slots=True)
class LeaseRead:
    """What was read; `lease` is None where the attempt has none."""

    attempt: int
    lease: LeaseSeen | None


@dataclass(frozen=True, slots=True)
class LeaseNotRead:
    """Storage refused."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Preserved:
    """What the RAM tier's policy keeps beside what the agreement keeps."""

    ids: frozenset[CheckpointId]


@dataclass(frozen=True, slots=True)
class Deleted:
    """Somebody here has removed the checkpoint, wherever this host can: `DeleteConfirmed`."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """The agent goes now."""


Input = (
    Found
    | Tick
    | Received
    | RankJoined
    | RankLeft
    | RankLost
    | PartBegun
    | PartSealed
    | PartAbandoned
    | CopiesOffered
    | Wish
    | BranchWanted
    | TargetWritten
    | ReplicaSealed
    | PullFailed
    | PartsWritten
    | WriteFailed
    | CommitWritten
    | CommitFailed
    | DurableListed
    | ListingFailed
    | AttemptBegun
    | AttemptTaken
    | BeginFailed
    | LeaseWritten
    | LeaseRead
    | LeaseNotRead
    | Preserved
    | Deleted
    | LeaveWanted
)
