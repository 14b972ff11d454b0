"""What trainers and the command line say to an agent, and what it answers: JSON over HTTP.

The agent listens on a Unix socket of the user's. An error is answered with the name of its class
and its message, and is raised as that class by the client. What a message may say is bounded here,
so that no handler is asked for what no trainer means.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from holdfast.coordination.messages import NAME_CHARS_MAX
from holdfast.coordination.settings import Settings, heartbeat_for
from holdfast.format.names import ATTEMPT_MAX, PART_COUNT_MAX, STEP_MAX

PROTOCOL_VERSION = 5

PENDING_COUNT_MIN = 3
PENDING_COUNT_MAX = 32
PENDING_SIZE_BYTES = 256 * 1024 * 1024
PATH_CHARS_MAX = 8192
COPIES_MAX = 64
"""Of so many parts at most one rank makes copies."""

WATCHED_MAX = 64
"""The pending checkpoints that one `Watch` names, the oldest ones first."""

Step = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
Attempt = Annotated[int, msgspec.Meta(ge=1, le=ATTEMPT_MAX)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=PART_COUNT_MAX)]
Count = Annotated[int, msgspec.Meta(ge=1, le=PART_COUNT_MAX)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Host = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]

Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=COPIES_MAX)]
Id = tuple[Step, Attempt]
"""(step, attempt)."""

# What `events` writes of itself in each line.
_RESERVED = frozenset(("self", "event", "checkpoint", "time", "host"))


def pending_limit(image_size_bytes: int) -> int:
    """How many of one rank's images may wait for the durable tier; of small ones, more."""
    affordable = PENDING_SIZE_BYTES // max(image_size_bytes, 1)
    return min(max(affordable, PENDING_COUNT_MIN), PENDING_COUNT_MAX)


class TierPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's policies, as far as the agent evaluates them; encoded by `holdfast.policy`."""

    save: str | None
    preserve: str | None
    user_preserves: bool = False


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer joins. `attempt` and `origin` are set if it was attached to an agent that is gone.

    `leader` is the host of rank 0, of `host_count`, and `addresses` are where other hosts' agents
    are reached; on one host there are none. `domain` is this host's failure domain: itself, where
    it is empty. `run` and `directory` tell which directory the trainer has open, by its path and by
    its device and inode: the agent has to hold the same one. Empty, neither is compared.
    """

    protocol: int = PROTOCOL_VERSION
    group: str
    rank: Rank
    count: Count
    attempt: Attempt | None
    takeover: bool
    durable: TierPolicies
    ram: TierPolicies | None
    ram_limit_bytes: Size | None
    linger_secs: Annotated[float, msgspec.Meta(ge=0)]
    origin: Id | None = None
    leader: Host = ""
    host_count: Count = 1
    addresses: dict[Host, Annotated[str, msgspec.Meta(max_length=300)]] = {}
    domain: Host = ""
    copies: Count = 2
    run: Annotated[str, msgspec.Meta(max_length=PATH_CHARS_MAX)] = ""
    directory: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def settings(self) -> Settings:
        """How the hosts of this job agree."""
        return Settings(copies=self.copies, heartbeat_secs=heartbeat_for(self.host_count))


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """Its place. `origin` is the checkpoint that the attempt goes on from.

    `cursor` is where the notices begin that concern its group.
    """

    attempt: int
    origin: Id | None
    seat: int
    ram_folder: str | None
    warnings: tuple[str, ...] = ()
    cursor: int = 0


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer restored `origin`, or overwrites its step: a new attempt begins there."""

    group: str
    rank: Rank
    attempt: Attempt
    origin: Id | None


class WantSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer is about to fill an image.

    `copies` are the ranks of whose parts it will make copies as well; `copy_of` tells that the
    image is one of those.
    """

    rank: Rank
    id: Id
    size_bytes: Size
    copies: Ranks = ()
    copy_of: Rank | None = None


class FillStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer fills an image into the slot that it had ready; `copies` as in `WantSlot`."""

    rank: Rank
    id: Id
    copies: Ranks = ()


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """The copies of parts that a trainer was to make; those that are `made` stand in its slots."""

    rank: Rank
    id: Id
    copies: Ranks
    made: Ranks


class WantSpare(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer wants a slot for its next image, whenever that comes.

    `whole_bytes` is the size of an image of all that the rank saves. `copy_of` as in `WantSlot`.
    """

    group: str
    rank: Rank
    size_bytes: Size
    whole_bytes: Size
    copy_of: Rank | None = None


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """The slot to fill; None, with the reason, where RAM has no room, and `busy` for a moment."""

    name: str | None
    reason: str = ""
    busy: bool = False


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A part is whole in a tier. `durable` tells that the checkpoint is to become durable.

    `again` tells that it was said to an agent that is gone.
    """

    rank: Rank
    id: Id
    part_count: Count
    tier: Annotated[str, msgspec.Meta(pattern="^(ram|durable)$")]
    durable: bool
    again: bool = False


class Abandoned(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer could not make its part of a checkpoint, or has `skipped` it."""

    rank: Rank
    id: Id
    reason: str
    skipped: bool = False


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for what happened after `cursor`; answered when there is something, or after a while.

    `pending` are checkpoints whose parts the trainer has reported as sealed and whose end it does
    not know. The answer names those of them that the agent does not know either.
    """

    group: str
    rank: Rank
    cursor: Number
    pending: Annotated[tuple[Id, ...], msgspec.Meta(max_length=WATCHED_MAX)] = ()


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened.

    `kind` of a checkpoint: protected, committed, preserved, failed, dropped, deleted, left behind
    (by ranks that went back to an earlier one). Else: fenced, gone, judge, warning, lost. A commit
    that has `data` was written by this agent, which posts `preserved` after it, once the
    preservation policy was applied or has failed. Of a trainer that is gone, and of trainers that
    are fenced, `data` names the group. `lost` is the run's directory.
    """

    kind: str
    id: Id | None = None
    reason: str = ""
    data: Any = None


class Notices(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, and the cursor to go on from.

    `unknown` are those of the trainer's pending checkpoints that are not in the agent's care, of
    which no notice up to `cursor` is still to come.
    """

    cursor: int
    notices: tuple[Notice, ...]
    unknown: tuple[Id, ...] = ()


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's own preservation policy keeps."""

    keep: tuple[Id, ...]


class RequestSave(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants a checkpoint at the next step: a person, or a user's own policy."""

    durable: bool = True
    reason: str = "request"


class Requested(msgspec.Struct, frozen=True, kw_only=True):
    """The step from which on the trainers will save."""

    target: int


class Delete(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint is to be removed from every tier."""

    ids: tuple[Id, ...]


class EventReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line for the run's events from a trainer."""

    event: str
    data: dict[str, Any]

    def __post_init__(self) -> None:
        reserved = _RESERVED & self.data.keys()
        if reserved:
            raise ValueError(f"{sorted(reserved)} are not a trainer's to say")
        if {"step", "attempt"} <= self.data.keys():
            msgspec.convert([self.data["step"], self.data["attempt"]], Id)


class Detach(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer leaves in good order."""

    group: str
    rank: Rank


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """The agent is to persist what it holds, clear its RAM and go."""


class PeerAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the agents of other hosts are reached now, by host, as far as this one knows."""

    addresses: dict[str, str]


class Empty(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to say."""


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error, by the name of its class."""

    error: str
    message: str


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer that is attached."""

    rank: int
    pid: int
    step: int | None


class HeldStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in the agent's care.

    `complete` and `committed` are so on all hosts together, as far as this one was told.
    """

    step: int
    attempt: int
    complete: bool
    parts_in_ram: int
    part_count: int
    committed: bool
    durable_due: bool
    failed: str | None


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent is doing.

    `peer_address` is where it serves its peers, if it does; `pulled_bytes` are those of images that
    it has copied from them. `waits_for` is what trainers whose attempt has not begun wait for; it
    is empty where there are none.
    """

    protocol: int = PROTOCOL_VERSION
    run: str
    run_id: str
    host: str
    pid: int
    attempt: int
    folder: str
    ram_bytes: int
    trainers: tuple[TrainerStatus, ...]
    held: tuple[HeldStatus, ...]
    pending: int
    leaves_in_secs: float | None
    peer_address: str | None = None
    pulled_bytes: int = 0
    waits_for: str = ""
