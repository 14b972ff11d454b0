"""The inputs of a host's node: local events, outcomes of effects, and messages of other hosts.

Each input is given once, in the order in which it happened. Inputs are lost with an agent; the node
of the next agent gets their result as what it finds on the host (`Found`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.coordination.effects import BeginAttempt
from holdfast.coordination.lease_seen import LeaseSeen
from holdfast.coordination.messages import NO_STEP, AnyMessage, TargetKind
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId

NO_RANK_BEHIND = 1 << 62


@dataclass(frozen=True, slots=True)
class Published:
    """The steps that this host's living ranks have published, as read just before the input.

    Attributes:
        highest: the highest step; -1 if no rank has published one.
        lowest: the lowest step; above all steps if no rank lives.
        save_cost_secs: the training time that a save costs the slowest of them; None if unknown.
    """

    highest: int = NO_STEP
    lowest: int = NO_RANK_BEHIND
    save_cost_secs: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint in a listing: the ranks whose part is whole, and the number of its parts."""

    part_count: int
    ranks: frozenset[int]

    @property
    def is_whole(self) -> bool:
        """Whether every rank's part is listed."""
        return len(self.ranks) == self.part_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an agent finds on its host when it starts: the RAM tier and the trainers that live.

    Attributes:
        ram: the checkpoints of which this host's RAM holds parts.
        replicas: for each checkpoint in RAM, the ranks whose part came from another host.
        due: the checkpoints that a trainer still expects to become durable.
        attempt, group, rank_count, leader, successors, origin: as last written by the previous
            agent, which keeps them also while no trainer lives. `leader` is rank 0's host.
        ranks: the ranks that are attached.
        is_broken: a rank of the group was lost.
        lost: the ranks here that ended without detaching.
        targets: the values of the target cells.
        is_confirmed: ranks may stop at the preemption target.
        ended_attempt: the newest attempt of which a rank has ended here.
    """

    ram: Mapping[CheckpointId, Listed] = field(default_factory=dict)
    replicas: Mapping[CheckpointId, frozenset[int]] = field(default_factory=dict)
    due: frozenset[CheckpointId] = frozenset()
    attempt: AttemptId = NO_ATTEMPT
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
    ended_attempt: AttemptId = NO_ATTEMPT


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; nothing else happened."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of host `sender` arrived."""

    sender: str
    message: AnyMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A trainer has attached.

    Attributes:
        group: the random token that all ranks of one start share.
        leader: rank 0's host.
        takeover: replace a live attempt.
        hosts: the hosts of all ranks, as far as they are known.
    """

    group: str
    rank: int
    rank_count: int
    leader: str
    takeover: bool = False
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A trainer detached."""

    group: str
    rank: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """A trainer ended without detaching."""

    group: str
    rank: int


@dataclass(frozen=True, slots=True)
class PartBegun:
    """A rank has read its target and begun a save."""

    rank: int
    id: CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSealed:
    """A rank's part is whole, in RAM or in the durable tier. `is_due`: it must become durable."""

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
    """At each save, a rank also writes replicas of the parts of `parts` into this host's RAM.

    The rank has the same bytes as they do. Each input replaces the previous one of the rank.
    """

    rank: int
    parts: frozenset[int]


@dataclass(frozen=True, slots=True)
class Wish:
    """A checkpoint is wanted soon: by a policy, by a user, or because of a notice to stop."""

    kind: TargetKind


@dataclass(frozen=True, slots=True)
class BranchWanted:
    """The ranks of `attempt` have gone back to `origin`."""

    attempt: AttemptId
    origin: CheckpointId | None


@dataclass(frozen=True, slots=True)
class TargetWritten:
    """The target cell was written, and the rest was read after that.

    `highest`: the highest published step. `is_missed`: a rank was at the target or beyond, did not
    publish in time that it has met it, and cannot save it at a later step, because others save with
    it.
    `read_from`: the first step at which each rank here reads the target, or has met it: the target,
    or a later one for the only rank of a job.
    """

    kind: TargetKind
    step: int
    highest: int
    is_missed: bool
    read_from: int


@dataclass(frozen=True, slots=True)
class ReplicaSealed:
    """This host's RAM holds a replica: pulled, or written by a rank that has the same bytes."""

    id: CheckpointId
    rank: int
    part_count: int


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A pull has failed."""

    id: CheckpointId
    rank: int


@dataclass(frozen=True, slots=True)
class PartsWritten:
    """These parts are durable."""

    id: CheckpointId
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Parts could not be made durable. `newer_attempt` is the attempt that forbids it, or 0."""

    id: CheckpointId
    reason: str
    newer_attempt: AttemptId = NO_ATTEMPT


@dataclass(frozen=True, slots=True)
class CommitWritten:
    """The manifest is written."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The manifest may or may not be written. `newer_attempt` is the one that forbids it, or 0."""

    id: CheckpointId
    reason: str
    newer_attempt: AttemptId = NO_ATTEMPT


@dataclass(frozen=True, slots=True)
class MirrorTarget:
    """A committed checkpoint that is to be copied to the remote tier."""

    id: CheckpointId
    part_count: int


@dataclass(frozen=True, slots=True)
class MirrorWanted:
    """The remote tier's policy wants a checkpoint copied; given to each leader anew."""

    target: MirrorTarget


@dataclass(frozen=True, slots=True)
class MirrorFound:
    """The newest checkpoint of the timeline that was found in the remote tier; None: there is none.

    Given to each leader anew.
    """

    id: CheckpointId | None


@dataclass(frozen=True, slots=True)
class MirrorUnwanted:
    """A checkpoint is not in the durable tier any more, so that it cannot be copied."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class MirrorPartWritten:
    """A part is in the remote tier; `written_bytes` is the size of what was written for it."""

    id: CheckpointId
    round: int
    rank: int
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MirrorPartsFailed:
    """Parts could not be written to the remote tier; those under way have ended.

    `newer_attempt` is the attempt there that forbids it, or none.
    """

    id: CheckpointId
    round: int
    reason: str
    newer_attempt: AttemptId = NO_ATTEMPT


@dataclass(frozen=True, slots=True)
class MirrorCommitWritten:
    """The manifest is written in the remote tier."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class MirrorCommitFailed:
    """The manifest may or may not be written in the remote tier; `newer_attempt` as above."""

    id: CheckpointId
    reason: str
    newer_attempt: AttemptId = NO_ATTEMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableListed:
    """The content of the durable tier.

    Attributes:
        newest_attempt: the newest attempt that has a record; 0 if there is none.
        leader: the host that began that attempt, by its name.
        is_begun_here: an agent of this folder began it: its record is noted there. The name proves
            nothing, since agents of several users, folders or containers share it.
        is_over: that attempt has this host's name and had no valid lease before the checkpoints
            were listed.
        limits: for each attempt on its timeline, the last step that counts.
        committed: the checkpoints that have a manifest.
        remote_only: those of them that only the remote tier has.
        parts: the checkpoints that have parts, committed or not.
    """

    newest_attempt: AttemptId
    leader: str
    limits: Mapping[AttemptId, int]
    committed: frozenset[CheckpointId]
    parts: Mapping[CheckpointId, Listed]
    remote_only: frozenset[CheckpointId] = frozenset()
    is_begun_here: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class ListingFailed:
    """The durable tier could not be listed; a final failure does not end by repeating it."""

    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """The attempt's record was put; there was none before."""

    asked: BeginAttempt


@dataclass(frozen=True, slots=True)
class AttemptTaken:
    """The attempt's number is taken: another start has put its record."""

    asked: BeginAttempt


@dataclass(frozen=True, slots=True)
class BeginFailed:
    """The storage request failed; whether the record is written is unknown.

    A final failure does not end by repeating it.
    """

    asked: BeginAttempt
    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class LeaseWritten:
    """The request to renew or release the lease has ended, successful or not.

    `newer`: an attempt that has begun since, if that was looked for.
    """

    attempt: AttemptId
    newer: AttemptId = NO_ATTEMPT


@dataclass(frozen=True, slots=True)
class LeaseRead:
    """The attempt's lease was read; `lease` is None if the attempt has none."""

    attempt: AttemptId
    lease: LeaseSeen | None


@dataclass(frozen=True, slots=True)
class LeaseNotRead:
    """The lease could not be read; a final failure does not end by repeating it."""

    attempt: AttemptId
    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Preserved:
    """The checkpoints that the RAM tier's policy keeps, besides those that the protocol keeps."""

    ids: frozenset[CheckpointId]


@dataclass(frozen=True, slots=True)
class Deleted:
    """The checkpoint was removed wherever this host can: `DeleteConfirmed` follows."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """The agent ends now."""


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
    | MirrorWanted
    | MirrorFound
    | MirrorUnwanted
    | MirrorPartWritten
    | MirrorPartsFailed
    | MirrorCommitWritten
    | MirrorCommitFailed
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
