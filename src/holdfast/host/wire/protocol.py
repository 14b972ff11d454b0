"""Define the messages from trainers and the command line to an agent, and its answers, as JSON.

They travel over HTTP on a Unix socket of the agent's user. An error is answered as the name of its
class and its message, and the client raises it as that class. The values of a message are bounded
here, so that no handler receives one that no trainer means.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from holdfast.coordination.messages import NAME_CHARS_MAX, REASON_CHARS_MAX
from holdfast.coordination.settings import Settings, heartbeat_for
from holdfast.format.names import PART_COUNT_MAX, STEP_MAX, AttemptId, CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.observe.events.schema import ReportedEvent

PROTOCOL_VERSION = 16

PENDING_COUNT_MIN = 3
PENDING_COUNT_MAX = 32
PENDING_SIZE_BYTES = 256 * 1024 * 1024
PATH_CHARS_MAX = 8192
COPIES_MAX = 64
"""The most parts of which one rank makes copies."""

SKIPPED = "skipped it, because earlier ones are still being saved"
"""The end of the reason for a checkpoint that is dropped because a rank had no room for it."""

WATCHED_MAX = 64
"""The pending checkpoints that one `Watch` names, the oldest ones first."""

Step = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=PART_COUNT_MAX)]
Count = Annotated[int, msgspec.Meta(ge=1, le=PART_COUNT_MAX)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Host = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]

Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=COPIES_MAX)]


def pending_limit(images_size_bytes: int) -> int:
    """Return how many checkpoints may wait for the durable tier, more of small ones.

    Args:
        images_size_bytes: the bytes of one checkpoint's images: in a trainer its own image, in the
            agent those of all ranks on the host.
    """
    affordable = PENDING_SIZE_BYTES // max(images_size_bytes, 1)
    return min(max(affordable, PENDING_COUNT_MIN), PENDING_COUNT_MAX)


class TierPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one tier's policies that the agent evaluates, encoded by `holdfast.policy`."""

    save: str | None
    preserve: str | None
    user_preserves: bool = False


class MetricsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where to serve metrics. `address` may name an interface; port 0 takes a free port."""

    address: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class RemoteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The run's remote tier: its path or URL, and its policies, encoded by `holdfast.policy`.

    `is_guarded`: nothing is removed there before a `Vouched` has arrived.
    """

    place: Annotated[str, msgspec.Meta(min_length=1, max_length=PATH_CHARS_MAX)]
    save: str
    preserve: str
    is_guarded: bool = False


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """Attach a trainer.

    Attributes:
        attempt: set, as is `origin`, if the trainer was attached to an agent that is gone.
        leader: the host of rank 0, of `host_count` hosts.
        addresses: where other hosts' agents are reached; empty on one host.
        domain: this host's failure domain; empty: the host itself.
        remote: the run's remote tier, if it has one.
        run: the path of the directory that the trainer has open; empty: it is not compared with the
            agent's.
        directory: the device and inode of that directory; empty: they are not compared.
        metrics: where the agent is to serve metrics; None: as it does.
        larger_job: the launcher, and the rank that it gave this process, if it has started more
            processes than the trainer's job has; for the message of a refusal.
    """

    protocol: int = PROTOCOL_VERSION
    group: str
    rank: Rank
    count: Count
    attempt: AttemptId | None
    takeover: bool
    durable: TierPolicies
    ram: TierPolicies | None
    ram_limit_bytes: Size | None
    linger_secs: Annotated[float, msgspec.Meta(ge=0)]
    origin: CheckpointId | None = None
    leader: Host = ""
    host_count: Count = 1
    addresses: dict[Host, Annotated[str, msgspec.Meta(max_length=300)]] = {}
    domain: Host = ""
    copies: Count = 2
    remote: RemoteRequest | None = None
    run: Annotated[str, msgspec.Meta(max_length=PATH_CHARS_MAX)] = ""
    directory: Annotated[str, msgspec.Meta(max_length=64)] = ""
    metrics: MetricsAddress | None = None
    larger_job: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)] = ""

    def settings(self) -> Settings:
        """Return the settings of the coordination of this job's hosts."""
        return Settings(copies=self.copies, heartbeat_secs=heartbeat_for(self.host_count))


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an attached trainer.

    Attributes:
        origin: the checkpoint from which the attempt continues.
        cursor: where the notices that concern the trainer's group begin.
    """

    attempt: AttemptId
    origin: CheckpointId | None
    seat: int
    ram_folder: str | None
    warnings: tuple[str, ...] = ()
    cursor: int = 0


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """Begin a new attempt at `origin`, which a trainer restored or whose step it overwrites."""

    group: str
    rank: Rank
    attempt: AttemptId
    origin: CheckpointId | None


class WantListing(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the newest checkpoints in the durable tier, as they were when an attempt began."""

    attempt: AttemptId


class ListedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of a `DurableListing`: the sizes of its objects, in bytes by file name."""

    id: CheckpointId
    committed: bool
    sizes: dict[str, Size]


class DurableListing(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoints in the durable tier, and the attempts.

    Attributes:
        numbers: the numbers of all attempts; empty if the agent has no listing that still holds.
        attempts: the records of those on the timeline.
        since_step: from which step on the sizes are given.
    """

    numbers: tuple[int, ...] = ()
    attempts: tuple[AttemptRecord, ...] = ()
    checkpoints: tuple[ListedCheckpoint, ...] = ()
    since_step: int = 0


class WantSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the slot of an image that a trainer is about to fill.

    Attributes:
        copies: the ranks of whose parts it will make copies as well.
        copy_of: set if the image is one of those copies.
    """

    rank: Rank
    id: CheckpointId
    size_bytes: Size
    copies: Ranks = ()
    copy_of: Rank | None = None


class FillStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Report that a trainer fills an image into its spare slot; `copies` as in `WantSlot`."""

    rank: Rank
    id: CheckpointId
    copies: Ranks = ()


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """Report the end of the copies that a trainer was to make; those in `made` are in its slots."""

    rank: Rank
    id: CheckpointId
    copies: Ranks
    made: Ranks


class WantSpare(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a slot for a trainer's next image, whenever that is taken.

    Attributes:
        whole_bytes: the size of an image of everything that the rank saves.
        copy_of: as in `WantSlot`.
    """

    group: str
    rank: Rank
    size_bytes: Size
    whole_bytes: Size
    copy_of: Rank | None = None


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """The slot to fill, or None with the reason; `busy` if RAM has no room only for the moment."""

    name: str | None
    reason: str = ""
    busy: bool = False


class PartTier(StrEnum):
    """Where a trainer writes its part."""

    RAM = "ram"
    DURABLE = "durable"


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """Report that a part is whole in a tier.

    Attributes:
        durable: whether the checkpoint is due in the durable tier.
        again: whether the same was reported to an agent that is gone.
        blocked_secs: how long the save has blocked the training thread.
        secs: the time from the call of `save`.
        written_bytes: the size of the image that was written.
        reused_bytes: the size of the rest of the part, in images that were written before.
    """

    rank: Rank
    id: CheckpointId
    part_count: Count
    tier: PartTier
    durable: bool
    again: bool = False
    blocked_secs: Duration = 0.0
    secs: Duration = 0.0
    written_bytes: Size = 0
    reused_bytes: Size = 0


class Abandoned(msgspec.Struct, frozen=True, kw_only=True):
    """Report that a trainer could not make its part of a checkpoint, or has `skipped` it."""

    rank: Rank
    id: CheckpointId
    reason: str
    skipped: bool = False


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the notices after `cursor`; answered when there is one, or after a while.

    `pending` are checkpoints whose parts the trainer has reported as sealed and whose end it does
    not know. The answer names those of them that the agent does not know either.
    """

    group: str
    rank: Rank
    cursor: Number
    pending: Annotated[tuple[CheckpointId, ...], msgspec.Meta(max_length=WATCHED_MAX)] = ()


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One event for the trainers.

    Attributes:
        kind: for a checkpoint: protected, committed, preserved, uploaded (the remote tier has it),
            failed, dropped, deleted, left behind (by ranks that went back to an earlier one),
            judge. Otherwise: fenced, gone, warning, information, lost (the run's directory).
        data: for `committed`: set if this agent wrote the commit; it then posts `preserved` once
            the preservation policy was applied or has failed. For `gone` and `fenced`: the group of
            the trainers. For `judge`: the checkpoints of the timeline after the commit `id`.
    """

    kind: str
    id: CheckpointId | None = None
    reason: str = ""
    data: Any = None


class Notices(msgspec.Struct, frozen=True, kw_only=True):
    """The notices after a cursor, and the cursor to continue from.

    `unknown` are those of the trainer's pending checkpoints that the agent does not hold, and for
    which no notice up to `cursor` is still to come.
    """

    cursor: int
    notices: tuple[Notice, ...]
    unknown: tuple[CheckpointId, ...] = ()


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Report the checkpoints that a user's own preservation policy keeps.

    Attributes:
        newest: The commit whose `judge` notice this answers.
        keep: The checkpoints to keep of those in the notice.
    """

    newest: CheckpointId
    keep: tuple[CheckpointId, ...]


class Vouched(msgspec.Struct, frozen=True, kw_only=True):
    """Report the step up to which the training vouches for checkpoints; -1: for none.

    Preservation of the remote tier keeps the newest one of these there.
    """

    step: int


class RequestSave(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a checkpoint at the next step, for a person or a user's own policy."""

    durable: bool = True
    reason: str = "request"


class Requested(msgspec.Struct, frozen=True, kw_only=True):
    """The step from which on the trainers will save."""

    target: int


class Delete(msgspec.Struct, frozen=True, kw_only=True):
    """Remove checkpoints from every tier. `by_user`: a person wants it, not a trainer."""

    ids: tuple[CheckpointId, ...]
    by_user: bool = False


class EventReport(msgspec.Struct, frozen=True, kw_only=True):
    """Add an event of a trainer or of `holdfast run` to the run's events."""

    event: ReportedEvent


class Detach(msgspec.Struct, frozen=True, kw_only=True):
    """Detach a trainer that closes its manager; `after_error`: because an exception was raised."""

    group: str
    rank: Rank
    after_error: bool = False


class Detached(msgspec.Struct, frozen=True, kw_only=True):
    """What stays after a trainer has detached.

    Attributes:
        is_last: whether no other trainer is attached.
        pid: the agent.
        ram_bytes: the RAM that it holds.
        is_writing: whether checkpoints must still become durable.
        leaves_in_secs: when it leaves; None: it is not known yet, as ranks on other hosts may close
            too.
        copies_to: the remote tier that lacks the newest checkpoint; empty: none does.
    """

    is_last: bool
    pid: int
    ram_bytes: Size
    is_writing: bool
    leaves_in_secs: float | None
    copies_to: str = ""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Make the agent persist its data, clear its RAM and exit."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the copy of a checkpoint to the remote tier, the newest one in the durable tier."""

    id: CheckpointId


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the remote tier has the checkpoint, or a later one, as far as this agent knows.

    A notice `uploaded` follows when it gets one. `problem` is why the last copy failed, where this
    agent leads the run; empty if it did not.
    """

    is_there: bool
    problem: str = ""


class PeerAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """The present addresses of other hosts' agents, by host, as far as this one knows."""

    addresses: dict[str, str]


class QuietHosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of the attempt that send nothing, so that nobody can wait for their parts.

    Attributes:
        hosts: some of them; empty: all send heartbeats, as far as this agent knows.
        is_writing: whether this agent writes to the durable tier, for a checkpoint of which all
            parts are known.
    """

    hosts: tuple[Host, ...]
    is_writing: bool


class Expect(msgspec.Struct, frozen=True, kw_only=True):
    """Stay until this process attaches. `run`, `directory` and `takeover` are as in `Attach`."""

    run: str = ""
    directory: str = ""
    takeover: bool = False


class Empty(msgspec.Struct, frozen=True, kw_only=True):
    """A message without content."""


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One attached trainer.

    Attributes:
        step: the last step that it has published.
        busy: why it may make no step for a while: a key of `run_status.BUSY_WORDS`; empty: for no
            reason.
    """

    rank: int
    pid: int
    step: int | None
    busy: str = ""


class HeldStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint that the agent holds.

    `complete` and `committed` hold for all hosts together, as far as this agent knows. `attempt` is
    the number of the attempt.
    """

    step: int
    attempt: int
    attempt_token: str
    complete: bool
    parts_in_ram: int
    part_count: int
    committed: bool
    durable_due: bool
    failed: str | None

    @property
    def id(self) -> CheckpointId:
        """The checkpoint."""
        return CheckpointId(self.step, AttemptId(self.attempt, self.attempt_token))


class RemoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The run's remote tier, as the agent that leads the run knows it.

    Attributes:
        newest_step: the newest checkpoint there; None: there is none, or it is not known.
        uploading_step: the checkpoint that is being copied now; None: none.
        parts_done: how many of its `part_count` parts are there.
        is_behind: whether the durable tier has a newer checkpoint.
        problem: why the last copy failed; empty if it did not.
    """

    place: str
    newest_step: int | None
    uploading_step: int | None
    parts_done: int
    part_count: int
    is_behind: bool
    problem: str


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's state.

    Attributes:
        peer_address: where it serves its peers, if it does.
        pulled_bytes: the bytes that it has copied from its peers' images.
        waits_for: what the trainers whose attempt has not begun wait for; empty if there are none.
        prometheus_url: where it serves metrics; None: it does not.
        prometheus_problem: why it does not where a trainer asked for it; None: none did.
        remote: the run's remote tier; None if it has none.
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
    prometheus_url: str | None = None
    prometheus_problem: str | None = None
    remote: RemoteStatus | None = None
