"""The messages between agents, as JSON.

Messages carry states, not events. A `Report` is the whole state of a host, `Orders` are all that
its leader wants of it. So a lost message costs the time until the next one, a repeated one changes
nothing, and an overtaken one is recognized by its number and ignored. No message needs an answer:
a state that was not acknowledged is sent again.

Each message carries the run and the newest attempt that its sender knows, which fences older ones.
Sizes are bounded: ranks are sent as runs, checkpoints are at most `HELD_MAX`, and successors at
most `SUCCESSORS_MAX`. See docs/decisions/0010.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from holdfast.coordination.rank_runs import Runs
from holdfast.coordination.settings import DELETED_MAX, QUIET_MAX
from holdfast.errors import InvalidArgumentError
from holdfast.format.names import NO_ATTEMPT, PART_COUNT_MAX, STEP_MAX, AttemptId, CheckpointId

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
NAME_CHARS_MAX = 255
REASON_CHARS_MAX = 500
SECS_MAX = 1e9
DELETED = "it was deleted"
"""The reason of a verdict on a checkpoint that was deleted."""
NO_STEP = -1

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Step = Annotated[int, msgspec.Meta(ge=NO_STEP, le=2 * STEP_MAX)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=PART_COUNT_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=PART_COUNT_MAX)]
Secs = Annotated[float, msgspec.Meta(ge=0, le=SECS_MAX)]


class TargetKind(StrEnum):
    """What a target is for; each kind has a cell in the control block, which ranks read."""

    DURABLE = "durable"
    RAM = "ram"
    PREEMPTION = "preemption"


class CheckpointStatus(StrEnum):
    """The status of a checkpoint, as its leader knows it."""

    OPEN = "open"
    COMPLETE = "complete"
    PROTECTED = "protected"
    COMMITTED = "committed"
    FAILED = "failed"
    DROPPED = "dropped"


COMPLETE_STATUSES = (
    CheckpointStatus.COMPLETE,
    CheckpointStatus.PROTECTED,
    CheckpointStatus.COMMITTED,
    CheckpointStatus.FAILED,
)
"""The statuses of a checkpoint that was complete at some time."""


class Refusal(StrEnum):
    """Why a start does not begin an attempt."""

    BUSY = "busy"
    """Another attempt lives, or another start replaced this one."""

    UNREACHED = "unreached"
    """A host of the start has not reported or answered in time."""

    STORAGE = "storage"
    """Storage failed."""

    UNRECORDED = "unrecorded"
    """Storage has committed checkpoints of newer attempts than those that it has records of."""


class TargetProposal(msgspec.Struct, frozen=True, array_like=True):
    """A step that all ranks have to save. `is_confirmed`: every host has accepted it."""

    kind: TargetKind
    step: Step
    is_confirmed: bool


class TargetState(msgspec.Struct, frozen=True, array_like=True):
    """The response of a host to a target.

    Attributes:
        is_accepted: None until the cell is written and the published steps were read after that.
        highest: the highest step that was published then.
        is_served: every rank here has begun its part, or has passed the target.
        is_confirmed: ranks that reach the target may stop there.
    """

    kind: TargetKind
    step: Step
    is_accepted: bool | None
    highest: Step
    is_served: bool
    is_confirmed: bool


class Held(msgspec.Struct, frozen=True, array_like=True):
    """The parts of one checkpoint that a host holds.

    Attributes:
        is_due: the checkpoint must become durable.
        own: the ranks whose part was sealed here.
        replicas: the ranks whose part is a replica of another host's.
        written: the ranks whose part this host has made durable.
        failure: why the host cannot write its parts in this `round`; empty if it can.
        round: the round of the last write order.
        abandoned: why a rank here could not make its part; empty if none failed.
        status: the status that the leader sent last; set in reports to a start alone.
    """

    id: CheckpointId
    part_count: Count
    is_due: bool
    own: Runs
    replicas: Runs
    written: Runs
    failure: Reason = ""
    round: Number = 0
    abandoned: Reason = ""
    status: CheckpointStatus = CheckpointStatus.OPEN


class Mirrored(msgspec.Struct, frozen=True, array_like=True):
    """What a host has written to the remote tier of the checkpoint that it was ordered to.

    Attributes:
        round: the round of the order.
        done: the ranks whose part is there.
        written_bytes: the size of the images that the host has written for them.
        failure: why the host cannot write the others in this `round`; empty if it can.
    """

    id: CheckpointId
    round: Number
    done: Runs
    written_bytes: Number
    failure: Reason = ""


class RankProgress(msgspec.Struct, frozen=True, array_like=True):
    """The last step whose part these ranks have sealed or abandoned in this attempt."""

    ranks: Runs
    step: Step


class BranchWish(msgspec.Struct, frozen=True, array_like=True):
    """Ranks went back to `origin` and want a new attempt from there."""

    attempt: AttemptId
    origin: CheckpointId | None


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a host, except published steps, which change all the time.

    Attributes:
        group: the token of the trainers here; empty if there are none.
        ranks: the ranks that live and are attached here.
        is_broken: one of the group's trainers here was lost.
        offers: the ranks whose parts trainers here copy from bytes of their own.
        left, lost: the ranks that have detached here, and that ended without detaching.
        progress: the last steps of the ranks here.
        targets: the responses to the leader's targets.
        wishes: the kinds of target that are wanted here.
        held: the parts that this host holds.
        branch: the branch that the ranks here want to begin.
        peers: the successors of the newest attempt known here; they may hold parts.
        deleted: the checkpoints deleted from this host; every leader, also a later one, gets them.
        ended_attempt: the newest attempt of which a rank has ended on this host, 0 if there is
            none; set in reports to a start alone.
        mirrored: the parts that this host has written to the remote tier, of the last order.
    """

    group: Name
    domain: Name
    rank_count: Count = 0
    ranks: Runs = ()
    is_broken: bool = False
    offers: Runs = ()
    left: Runs = ()
    lost: Runs = ()
    progress: tuple[RankProgress, ...] = ()
    targets: tuple[TargetState, ...] = ()
    wishes: tuple[TargetKind, ...] = ()
    held: tuple[Held, ...] = ()
    branch: BranchWish | None = None
    peers: tuple[Name, ...] = ()
    deleted: Annotated[tuple[CheckpointId, ...], msgspec.Meta(max_length=DELETED_MAX)] = ()
    ended_attempt: AttemptId = NO_ATTEMPT
    mirrored: Mirrored | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="message", tag=True):
    """The fields of all messages; `attempt` is the newest one that the sender knows."""

    run: Name
    attempt: AttemptId


class Report(Message, frozen=True, kw_only=True):
    """The state of a host, to its leader or to a start.

    Attributes:
        incarnation: grows with every start of the host's agent.
        seq: grows with every report; older reports are ignored.
        version: grows with every change of `state`.
        term, leader_incarnation: the leader whose orders the host follows.
        ack: the last version of these orders that has arrived.
        published: the highest step that a rank here has published.
        save_cost_secs: the training time that a save costs the slowest rank here; None if unknown.
        is_hello: the report is for a start, not for the present attempt's leader.
    """

    incarnation: Number
    seq: Number
    version: Number
    term: Number
    leader_incarnation: Number
    ack: Number
    published: Step
    is_hello: bool
    state: HostState
    save_cost_secs: Secs | None = None


class CheckpointVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The status of one checkpoint that the host holds, and whether its RAM may be released."""

    id: CheckpointId
    status: CheckpointStatus
    may_release: bool
    reason: Reason = ""


class WriteOrder(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a checkpoint that the host has to make durable.

    `round` counts how often writing the checkpoint was restarted after it had failed.
    """

    id: CheckpointId
    ranks: Runs
    round: Number


class PullOrder(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a checkpoint that the host has to copy from `source`."""

    id: CheckpointId
    part_count: Count
    ranks: Runs
    source: Name


class MirrorOrder(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a committed checkpoint that the host has to write to the remote tier.

    `round` counts the tries of all checkpoints; in a new one the host begins anew.
    """

    id: CheckpointId
    ranks: Runs
    round: Number


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Ranks of one host that have ended; `is_lost`: they did not detach."""

    host: Name
    ranks: Runs
    is_lost: bool


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """All that a leader wants of one host.

    Attributes:
        targets: the targets to set; None: leave the cells as they are, because the leader does not
            know the targets of the previous leader yet.
        verdicts: on each checkpoint that the host has reported.
        writes, pulls: the parts that the host has to make durable, and to copy.
        mirror: the parts that it has to write to the remote tier.
        mirrored: the newest checkpoint of the timeline that the remote tier has; None: none is
            known.
        is_settled: no checkpoint is pending, and the newest complete one is committed.
        is_closed: all ranks of the attempt have detached.
        deleted_everywhere: the checkpoints deleted from this host of which no host holds anything.
        ended: the ranks of the attempt that have ended, of the first hosts that lost any.
        quiet: the hosts of the attempt that have sent nothing for `Settings.quiet_secs`.
    """

    targets: tuple[TargetProposal, ...] | None = None
    verdicts: tuple[CheckpointVerdict, ...] = ()
    writes: tuple[WriteOrder, ...] = ()
    pulls: tuple[PullOrder, ...] = ()
    mirror: MirrorOrder | None = None
    mirrored: CheckpointId | None = None
    is_settled: bool = False
    is_closed: bool = False
    deleted_everywhere: tuple[CheckpointId, ...] = ()
    ended: tuple[Ended, ...] = ()
    quiet: Annotated[tuple[Name, ...], msgspec.Meta(max_length=QUIET_MAX)] = ()


class Orders(Message, frozen=True, kw_only=True):
    """A leader's orders to one host.

    Attributes:
        term: the leader's term; hosts follow the highest one.
        version: grows with every change of `command`.
        ack: the last version of the host's report that has arrived.
        follower_incarnation: that of the report; 0 if none has arrived. Another incarnation of the
            host's agent takes the leadership from these orders, and not the command.
        origin: the checkpoint that the attempt continued from.
        successors: the hosts that lead when the leader is silent, the leader first.
    """

    group: Name
    term: Number
    incarnation: Number
    seq: Number
    version: Number
    ack: Number
    follower_incarnation: Number
    origin: CheckpointId | None
    rank_count: Count
    successors: tuple[Name, ...]
    command: Command


class Newer(Message, frozen=True, kw_only=True):
    """To a host that is behind: `attempt` is the newest, and `leader` leads it in `term`."""

    leader: Name
    term: Number


class Probe(Message, frozen=True, kw_only=True):
    """A start asks the leader of the newest attempt whether its trainers live."""

    group: Name


class Alive(Message, frozen=True, kw_only=True):
    """The answer to `Probe`. `is_living`: trainers of another group than `group` can continue."""

    group: Name
    is_living: bool


class Refused(Message, frozen=True, kw_only=True):
    """The trainers of `group` cannot begin an attempt."""

    group: Name
    reason: Reason
    kind: Refusal


class WhoHolds(Message, frozen=True, kw_only=True):
    """A start requests a report of a host that has none of its trainers."""

    group: Name


class Leaving(Message, frozen=True, kw_only=True):
    """A host's agent ends, and its RAM is released."""

    incarnation: Number


AnyMessage = Report | Orders | Newer | Probe | Alive | Refused | WhoHolds | Leaving

_decoder = msgspec.json.Decoder(AnyMessage)


def encode_message(message: AnyMessage) -> bytes:
    """Return the message as JSON."""
    return msgspec.json.encode(message)


def decode_message(data: bytes) -> AnyMessage:
    """Return the message in `data`, which another host has sent.

    Raises:
        InvalidArgumentError: `data` is no valid message, or larger than `MESSAGE_BYTES_MAX`.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise InvalidArgumentError(
            f"read an agent's message: expected at most {MESSAGE_BYTES_MAX} bytes, found "
            f"{len(data)}; is another program using this port?"
        )
    try:
        message: AnyMessage = _decoder.decode(data)
        _check(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InvalidArgumentError(
            f"read an agent's message: expected one of Holdfast's, found {len(data)} bytes that "
            f"are none: {error}; do all hosts run one version?"
        ) from error
    return message


def _check(message: AnyMessage) -> None:
    """Check what the types do not: the bounds of ids, and that runs are valid."""
    if isinstance(message, Report):
        for held in message.state.held:
            check_held(held)
        state = message.state
        for ranks in (state.ranks, state.offers, state.left, state.lost):
            check_runs(ranks, state.rank_count)
        for progress in state.progress:
            check_runs(progress.ranks, PART_COUNT_MAX)
        for deleted in state.deleted:
            _check_id(deleted)
        if state.mirrored is not None:
            _check_id(state.mirrored.id)
            check_runs(state.mirrored.done, PART_COUNT_MAX)
    elif isinstance(message, Orders):
        orders: tuple[WriteOrder | PullOrder, ...] = message.command.writes + message.command.pulls
        for order in orders:
            _check_id(order.id)
            check_runs(order.ranks, PART_COUNT_MAX)
        for verdict in message.command.verdicts:
            _check_id(verdict.id)
        if message.command.mirror is not None:
            _check_id(message.command.mirror.id)
            check_runs(message.command.mirror.ranks, PART_COUNT_MAX)
        if message.command.mirrored is not None:
            _check_id(message.command.mirrored)
        for ended in message.command.ended:
            check_runs(ended.ranks, message.rank_count)
        for deleted in message.command.deleted_everywhere:
            _check_id(deleted)


def _check_id(found: CheckpointId) -> None:
    if not found.is_valid:
        raise ValueError(f"step {found.step} of attempt {found.attempt} is no checkpoint")


def check_held(held: Held) -> None:
    """Check a host's report of the parts of one checkpoint.

    Raises:
        ValueError: it names an impossible checkpoint, or ranks that it cannot have.
    """
    _check_id(held.id)
    for runs in (held.own, held.replicas, held.written):
        check_runs(runs, held.part_count)


def check_runs(runs: Runs, limit: int) -> None:
    """Check that runs ascend and name ranks below `limit`.

    Otherwise a message of a few bytes could name a billion ranks, and exhaust memory.

    Raises:
        ValueError: they do not.
    """
    end = 0
    for first, count in runs:
        if first < end or count < 1 or first + count > limit:
            raise ValueError(f"{runs[:4]} are no ranks below {limit}")
        end = first + count + 1
