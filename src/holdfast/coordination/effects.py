"""What a host's machine wants done. Nobody blocks: an outcome comes back as a fact.

They are done in the order in which they are given. A machine has at most `PULLS_MAX` pulls, one
persist, one commit, one listing, one begin, one writing and one reading of a lease under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.messages import AnyMessage, CheckpointStatus, Refusal, TargetKind
from holdfast.format.names import CheckpointId


@dataclass(frozen=True, slots=True)
class Send:
    """To be sent, once, without waiting for it; it may be lost."""

    host: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class SetTarget:
    """Write the word, then read the published steps: `TargetWritten`."""

    kind: TargetKind
    step: int


@dataclass(frozen=True, slots=True)
class ConfirmTarget:
    """Ranks that reach the preemption's target may stop there."""

    step: int


@dataclass(frozen=True, slots=True)
class ClearTarget:
    """Write that there is no target; also that none is confirmed, where it is the preemption's."""

    kind: TargetKind


@dataclass(frozen=True, slots=True)
class Persist:
    """Make these durable, unless a newer attempt forbids it: `PartsWritten`, `WriteFailed`."""

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
class Drop:
    """Its RAM here may be used for something else."""

    id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """Notify the ranks here that a checkpoint is protected, committed, failed or dropped.

    `PROTECTED` ends a save for RAM alone, and comes before one of the others where it `is_due` in
    the durable tier. One that is given up for a newer protected one, before it was so itself, is
    called protected too: nothing is lost with it.
    """

    id: CheckpointId
    status: CheckpointStatus
    reason: str
    is_due: bool = False


@dataclass(frozen=True, slots=True)
class DeleteConfirmed:
    """Of what was deleted here no host of the attempt holds or writes anything any more."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class AttemptJoined:
    """The ranks of `group` are part of that attempt; their words are clear."""

    group: str
    attempt: int
    origin: CheckpointId | None
    successors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RanksEnded:
    """Tell the ranks of `group` here that these, on another host, are gone; lost or in good order.

    Each is told once for each agent that tells the ranks here.
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
    """The ranks of `group` must stop: `attempt` has taken the run over."""

    group: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ListDurable:
    """List the durable tier: `DurableListed`, `ListingFailed`."""


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """Put the attempt's record if there is none: `AttemptBegun`, `AttemptTaken`, `BeginFailed`."""

    attempt: int
    origin: CheckpointId | None
    group: str


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Write the attempt's lease, whose content differs from the one before: `LeaseWritten`."""

    attempt: int
    incarnation: int
    counter: int


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Remove the attempt's lease: `LeaseWritten`."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Read an attempt's lease and its age: `LeaseRead`, `LeaseNotRead`."""

    attempt: int


@dataclass(frozen=True, slots=True)
class LeaseAwaited:
    """For the log: a start waits at most `secs` to see whether the attempt of `host` lives."""

    attempt: int
    host: str
    secs: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """For the run's events and its users: an attempt began from an older checkpoint than this one.

    `status` is how far this one had come, as far as hosts report.
    """

    id: CheckpointId
    status: CheckpointStatus
    reason: str


@dataclass(frozen=True, slots=True)
class Reached:
    """For the run's events and the policies, on the leader's host: a checkpoint has come so far.

    `is_due`: it is to become durable.
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
    | GivenUp
    | Reached
)
