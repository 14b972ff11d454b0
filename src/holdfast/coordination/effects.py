"""The effects of a host's node: operations that the agent carries out.

The node does not wait for an effect: its outcome, if it has one, comes back as an input. Each
docstring names the inputs. Effects are carried out in the order in which they are given. A node has
at most `PULLS_MAX` pulls, one persist, one commit, one listing, one begin, one write and one read
of a lease under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.messages import AnyMessage, CheckpointStatus, Refusal, TargetKind
from holdfast.format.names import NO_ATTEMPT, STEP_MAX, AttemptId, CheckpointId


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message once, without waiting; it may be lost."""

    host: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class SetTarget:
    """Write the target cell, then read the published steps: `TargetWritten`."""

    kind: TargetKind
    step: int


@dataclass(frozen=True, slots=True)
class ConfirmTarget:
    """Allow ranks that reach the preemption target to stop there."""

    step: int


@dataclass(frozen=True, slots=True)
class ClearTarget:
    """Clear the target cell; for the preemption target, also its confirmation."""

    kind: TargetKind


@dataclass(frozen=True, slots=True)
class Persist:
    """Make parts durable, unless a newer attempt forbids it: `PartsWritten`, `WriteFailed`."""

    id: CheckpointId
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Pull:
    """Copy a part from another host's RAM: `ReplicaSealed`, `PullFailed`."""

    id: CheckpointId
    rank: int
    part_count: int
    source: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the manifest, unless a newer attempt forbids it: `CommitWritten`, `CommitFailed`."""

    id: CheckpointId
    part_count: int


@dataclass(frozen=True, slots=True)
class MirrorParts:
    """Write parts to the remote tier: for each `MirrorPartWritten`, or once `MirrorPartsFailed`.

    Further parts of the same checkpoint and round add to those under way. Any other checkpoint or
    round replaces them; without ranks, it only ends them.
    """

    id: CheckpointId
    round: int
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class MirrorCommit:
    """Write the manifest in the remote tier, unless a newer attempt there forbids it.

    `MirrorCommitWritten`, `MirrorCommitFailed`.
    """

    id: CheckpointId
    part_count: int


@dataclass(frozen=True, slots=True)
class MirrorEnded:
    """Report that a checkpoint is in the remote tier, or that a try to copy it has failed.

    Attributes:
        host_count: how many hosts wrote parts of it.
        written_bytes: the size of the images that they wrote.
        reason: why it failed; empty if it is there.
    """

    id: CheckpointId
    host_count: int = 0
    written_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReportMirrored:
    """Notify the trainers here that the remote tier has a checkpoint, the newest one there."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Drop:
    """Release this host's RAM of the checkpoint for reuse."""

    id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """Notify the ranks here that a checkpoint is protected, committed, failed or dropped.

    `PROTECTED` ends a save for RAM alone. For a save that `is_due` in the durable tier, one of the
    other three follows it. A checkpoint that was released for a newer protected one, before it was
    protected itself, is reported as protected too: the newer one replaces it.
    """

    id: CheckpointId
    status: CheckpointStatus
    reason: str
    is_due: bool = False


@dataclass(frozen=True, slots=True)
class DeleteConfirmed:
    """No host of the attempt holds or writes any part of a checkpoint that was deleted here."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class AttemptJoined:
    """The ranks of `group` belong to the attempt; their target cells are clear."""

    group: str
    attempt: AttemptId
    origin: CheckpointId | None
    successors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RanksEnded:
    """Notify the ranks of `group` here that `ranks` of another host have ended.

    `is_lost`: they ended without detaching. An agent gives each rank once; the next agent on this
    host gives it again.
    """

    group: str
    host: str
    ranks: tuple[int, ...]
    is_lost: bool


@dataclass(frozen=True, slots=True)
class GroupRefused:
    """The ranks of `group` cannot begin an attempt."""

    group: str
    reason: str
    kind: Refusal


@dataclass(frozen=True, slots=True)
class Fenced:
    """Stop the ranks of `group`: `attempt` has taken over the run."""

    group: str
    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class ListDurable:
    """List the durable tier: `DurableListed`, `ListingFailed`.

    Attributes:
        attempt: The attempt whose leader wants it; 0: a start does.
        since_step: The parts of checkpoints of this step and later ones are needed, beside those
            that are newer than the newest committed one.
    """

    attempt: AttemptId = NO_ATTEMPT
    since_step: int = STEP_MAX


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """Put the attempt's record if there is none: `AttemptBegun`, `AttemptTaken`, `BeginFailed`."""

    attempt: AttemptId
    origin: CheckpointId | None
    group: str


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Write the attempt's lease; the counter makes each one's content new: `LeaseWritten`.

    `is_storing`: its trainers have ended, and what they have left is being stored.
    """

    attempt: AttemptId
    incarnation: int
    counter: int
    is_storing: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Remove the attempt's lease: `LeaseWritten`."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Read an attempt's lease and its age: `LeaseRead`, `LeaseNotRead`."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class LeaseAwaited:
    """Log that a start waits at most `secs` to find out whether the attempt of `host` lives.

    `is_storing`: it has ended, and the start waits until `host` has stored its checkpoints.
    """

    attempt: AttemptId
    host: str
    secs: float
    is_storing: bool


@dataclass(frozen=True, slots=True)
class RamGivenUp:
    """Report that a start waits no more for `host`, which may have checkpoints in RAM alone."""

    attempt: AttemptId
    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Report, in the events and to users, that an attempt began from an older checkpoint than `id`.

    `status` is the last status of this one that a host reports; complete if no host reports one and
    its parts are there, but of an attempt that storage does not know.
    """

    id: CheckpointId
    status: CheckpointStatus
    reason: str


@dataclass(frozen=True, slots=True)
class HostSilent:
    """Report that a host with ranks of the attempt has sent nothing for `secs`; once, by a leader.

    `HostHeard` follows when it reports again.
    """

    host: str
    secs: float


@dataclass(frozen=True, slots=True)
class HostHeard:
    """Report that a silent host has reported again."""

    host: str


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Report that this host follows another leader of the same attempt than before.

    `is_first`: it is the host of rank 0, which leads again.
    """

    leader: str
    before: str
    is_first: bool


@dataclass(frozen=True, slots=True)
class ProtectionLate:
    """Report that saves have waited for `secs` while no checkpoint was protected; by a leader.

    `first_step` and `last_step` are the lowest and the highest step that waits.
    """

    first_step: int
    last_step: int
    secs: float


@dataclass(frozen=True, slots=True)
class Reached:
    """Record, in the events and for the policies, that a checkpoint has got a new status.

    Given on the leader's host alone. `is_due`: the checkpoint must become durable.
    """

    id: CheckpointId
    status: CheckpointStatus
    is_due: bool
    reason: str


Effect = (
    Send
    | SetTarget
    | ConfirmTarget
    | ClearTarget
    | Persist
    | Pull
    | Commit
    | MirrorParts
    | MirrorCommit
    | MirrorEnded
    | ReportMirrored
    | Drop
    | ReportOutcome
    | DeleteConfirmed
    | AttemptJoined
    | RanksEnded
    | GroupRefused
    | Fenced
    | ListDurable
    | BeginAttempt
    | RenewLease
    | ReleaseLease
    | ReadLease
    | LeaseAwaited
    | RamGivenUp
    | GivenUp
    | HostSilent
    | HostHeard
    | LeaderChanged
    | ProtectionLate
    | Reached
)
