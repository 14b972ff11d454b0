"""What agents say to each other, as JSON.

Agents tell states, not events. A `Report` is all that a host has to say, `Orders` are all that its
leader wants of it. So a lost message costs the time until the next one, a repeated one changes
nothing, and one that was overtaken is recognized by its number and passed over. No message is
answered by necessity: what was not acknowledged is told again.

Each message carries the run and the newest attempt its sender knows of: that fences the older ones.
Sizes are bounded: ranks come as runs, checkpoints are at most `HELD_MAX`, and
successors `SUCCESSORS_MAX`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from holdfast.coordination.rank_runs import Runs
from holdfast.coordination.settings import DELETED_MAX
from holdfast.errors import InvalidArgumentError
from holdfast.format.names import ATTEMPT_MAX, PART_COUNT_MAX, STEP_MAX, CheckpointId

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
NAME_CHARS_MAX = 255
REASON_CHARS_MAX = 500
SECS_MAX = 1e9
NO_STEP = -1

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=ATTEMPT_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Step = Annotated[int, msgspec.Meta(ge=NO_STEP, le=2 * STEP_MAX)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=PART_COUNT_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=PART_COUNT_MAX)]
Secs = Annotated[float, msgspec.Meta(ge=0, le=SECS_MAX)]


class TargetKind(StrEnum):
    """What a target is for; each kind has a word that ranks read."""

    DURABLE = "durable"
    RAM = "ram"
    PREEMPTION = "preemption"


class CheckpointStatus(StrEnum):
    """How far a checkpoint has come, as its leader knows."""

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
    """Another attempt lives, or another start took its place."""

    UNREACHED = "unreached"
    """A host of the start has not reported, or has not answered, in time."""

    STORAGE = "storage"
    """Storage failed."""


class TargetProposal(msgspec.Struct, frozen=True, array_like=True):
    """A step that all ranks are to save. `is_confirmed`: every host has accepted it."""

    kind: TargetKind
    step: Step
    is_confirmed: bool


class TargetState(msgspec.Struct, frozen=True, array_like=True):
    """What a host made of a target.

    Attributes:
        is_accepted: None until the word stands and the published steps were read after that.
        highest: the highest step that was published then.
        is_served: every rank here has begun its part, or is beyond it.
        is_confirmed: ranks that reach it may stop there.
    """

    kind: TargetKind
    step: Step
    is_accepted: bool | None
    highest: Step
    is_served: bool
    is_confirmed: bool


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a host holds of one checkpoint.

    Attributes:
        own: the ranks whose part was sealed here; `replicas`: pulled from another host.
        written: the ranks whose part this host has made durable.
        failure: why it cannot make its share durable, in that `round`; empty where it can.
        abandoned: why a rank here could not make its part; empty where none failed to.
        status: how far the leader said last that it has come; set in reports to a start alone.
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


class RankProgress(msgspec.Struct, frozen=True, array_like=True):
    """The last step that these ranks have sealed or given up in this attempt."""

    ranks: Runs
    step: Step


class BranchWish(msgspec.Struct, frozen=True, array_like=True):
    """Ranks went back to `origin` and want a new attempt from there."""

    attempt: Attempt
    origin: CheckpointId | None


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a host has to say, but for steps, which change all the time.

    Attributes:
        group: the word of the trainers here; empty where there are none.
        ranks: those that are attached and live.
        is_broken: one of the group's trainers here ended without a word.
        offers: the ranks whose parts trainers here copy by themselves, from bytes of their own.
        left, lost: its ranks that have left in good order, and that ended without a word.
        peers: the successors of the newest attempt that is known here; they may hold something.
        deleted: what somebody here has removed; every leader is told, also a later one.
        ended_attempt: the newest attempt of which a rank has ended on this host, 0 where there is
            none; set in reports to a start alone.
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
    ended_attempt: Attempt = 0


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="message", tag=True):
    """What all messages have; `attempt` is the newest one that the sender knows of."""

    run: Name
    attempt: Attempt


class Report(Message, frozen=True, kw_only=True):
    """A host to its leader: hello, who holds what, accept or refuse, sealed, replicated, durable.

    Attributes:
        incarnation: grows with every start of the host's agent.
        seq: grows with every report; an older one is passed over.
        version: grows where `state` is another one than before.
        term, leader_incarnation: whose orders it follows, and `ack` the last version of them.
        published: the highest step that a rank here has published.
        save_cost_secs: what a checkpoint costs the dearest rank here; None until one knows.
        is_hello: it is for an attempt that is to begin, not for the present one's leader.
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
    """How far one checkpoint that the host holds has come, and whether its RAM may be reused."""

    id: CheckpointId
    status: CheckpointStatus
    may_release: bool
    reason: Reason = ""


class WriteOrder(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a checkpoint that the host is to make durable.

    `round` counts how often it has been begun anew after it had failed.
    """

    id: CheckpointId
    ranks: Runs
    round: Number


class PullOrder(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a checkpoint that the host is to copy from `source`."""

    id: CheckpointId
    part_count: Count
    ranks: Runs
    source: Name


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Ranks of one host that are gone; `is_lost`: they ended without a word."""

    host: Name
    ranks: Runs
    is_lost: bool


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """All that a leader wants of one host.

    Attributes:
        targets: what the words are to say; None: as they are (the leader does not know yet).
        verdicts: on each checkpoint that the host said it holds.
        is_settled: nothing is on its way to the durable tier, and the newest one is there.
        gone: of what was removed on this host, that of which no host holds anything any more.
        ended: ranks of the attempt that are gone, those of the hosts where that came first.
    """

    targets: tuple[TargetProposal, ...] | None = None
    verdicts: tuple[CheckpointVerdict, ...] = ()
    writes: tuple[WriteOrder, ...] = ()
    pulls: tuple[PullOrder, ...] = ()
    is_settled: bool = False
    deleted_everywhere: tuple[CheckpointId, ...] = ()
    ended: tuple[Ended, ...] = ()


class Orders(Message, frozen=True, kw_only=True):
    """A leader to one host: attempt begun, propose, confirm, pull, persist, committed, dropped.

    Attributes:
        term: which successor leads; a higher one is followed rather than a lower one.
        version: grows where `command` is another one than before; `ack` is the report's.
        origin: what the attempt went on from.
        successors: who leads where the leader is silent, the leader first.
    """

    group: Name
    term: Number
    incarnation: Number
    seq: Number
    version: Number
    ack: Number
    origin: CheckpointId | None
    rank_count: Count
    successors: tuple[Name, ...]
    command: Command


class Newer(Message, frozen=True, kw_only=True):
    """To somebody who is behind: that attempt is the newest, and `leader` leads it in `term`."""

    leader: Name
    term: Number


class Probe(Message, frozen=True, kw_only=True):
    """A new attempt's leader asks the one before whether its trainers live."""

    group: Name


class Alive(Message, frozen=True, kw_only=True):
    """The answer: `is_living` where trainers of another group than the asking one can go on."""

    group: Name
    is_living: bool


class Refused(Message, frozen=True, kw_only=True):
    """The trainers of `group` cannot begin an attempt."""

    group: Name
    reason: Reason
    kind: Refusal


class WhoHolds(Message, frozen=True, kw_only=True):
    """A start asks a host that has none of its trainers for a report."""

    group: Name


class Leaving(Message, frozen=True, kw_only=True):
    """A host's agent goes, and its RAM with it."""

    incarnation: Number


AnyMessage = Report | Orders | Newer | Probe | Alive | Refused | WhoHolds | Leaving

_decoder = msgspec.json.Decoder(AnyMessage)


def encode_message(message: AnyMessage) -> bytes:
    """The message as JSON."""
    return msgspec.json.encode(message)


def decode_message(data: bytes) -> AnyMessage:
    """The message in `data`, which came from another host.

    Raises:
        InvalidArgumentError: it is no message of this protocol, or is larger than any may be.
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
    """Checks what types do not tell: the bounds of ids, and that runs are runs."""
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
    elif isinstance(message, Orders):
        orders: tuple[WriteOrder | PullOrder, ...] = message.command.writes + message.command.pulls
        for order in orders:
            _check_id(order.id)
            check_runs(order.ranks, PART_COUNT_MAX)
        for verdict in message.command.verdicts:
            _check_id(verdict.id)
        for ended in message.command.ended:
            check_runs(ended.ranks, message.rank_count)
        for deleted in message.command.deleted_everywhere:
            _check_id(deleted)


def _check_id(found: CheckpointId) -> None:
    if not (0 <= found.step <= STEP_MAX and 1 <= found.attempt <= ATTEMPT_MAX):
        raise ValueError(f"step {found.step} of attempt {found.attempt} is no checkpoint")


def check_held(held: Held) -> None:
    """Checks what a host says that it holds.

    Raises:
        ValueError: it names no checkpoint, or no ranks of it.
    """
    _check_id(held.id)
    for runs in (held.own, held.replicas, held.written):
        check_runs(runs, held.part_count)


def check_runs(runs: Runs, limit: int) -> None:
    """Checks that runs are ranks below `limit`; else a few bytes could name a billion of them.

    Raises:
        ValueError: they are not.
    """
    end = 0
    for first, count in runs:
        if first < end or count < 1 or first + count > limit:
            raise ValueError(f"{runs[:4]} are no ranks below {limit}")
        end = first + count + 1
