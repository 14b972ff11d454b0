"""Define the events of a run: one message per event, tagged by name and versioned.

Each line of an event file is one event as a JSON object. `docs/events.md` lists all of them; a test
compares its table with this module.

Invariants:
- An event is complete by itself: durations and bytes are measured where they occur, and no reader
  has to subtract the times of two hosts.
- A changed meaning of a member needs a new `VERSION`. A new member with a default value, and a new
  event, do not: readers ignore members that they do not know, and report events that they do not
  know.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, ClassVar

import msgspec

from holdfast.format.names import ATTEMPT_MAX, PART_COUNT_MAX, STEP_MAX

VERSION = 1
UNSTAMPED = datetime.min.replace(tzinfo=UTC)
"""The time of an event that was not written yet; the writer replaces it."""
TRAINING_WAITS = ("data", "evaluation", "other")
"""The reasons for which a training reports that it waits."""
COMPILATION = "compilation"
WAIT_REASONS = (*TRAINING_WAITS, COMPILATION)
"""What a training can report that it waits for."""
SHOWN_MAX = 20
"""How many skipped checkpoints and bad copies an event lists."""

Step = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
AttemptNumber = Annotated[int, msgspec.Meta(ge=0, le=ATTEMPT_MAX)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=PART_COUNT_MAX)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Secs = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Time = Annotated[datetime, msgspec.Meta(tz=True)]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What every event has.

    Attributes:
        version: the version of the schema.
        time: when it happened, by the host's clock.
        uptime_secs: the same moment on the host's monotonic clock, which is never set back and
            begins again when the host is restarted.
        host: the host that wrote it.
        run_attempt: the newest attempt that the host knew; 0 before the first.
    """

    is_of_saves: ClassVar[bool] = False
    """Whether it occurs with every save. Such events have files and a size limit of their own, so
    that they never displace the others."""

    version: int = VERSION
    time: Time = UNSTAMPED
    uptime_secs: Secs = 0.0
    host: str = ""
    run_attempt: AttemptNumber = 0


class CheckpointEvent(Event, frozen=True, kw_only=True):
    """An event about the checkpoint of `step` that `attempt` saved."""

    step: Step
    attempt: AttemptNumber

    @property
    def step_and_attempt(self) -> tuple[int, int]:
        """The step, and the number of the attempt."""
        return self.step, self.attempt


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The durations of some steps.

    Attributes:
        steps: how many.
        secs: their duration together, without the waits that the training reported.
        median_secs: the median duration of one.
        max_secs: the duration of the longest one, of those that were made between two looks the
            mean.
    """

    steps: Count = 0
    secs: Secs = 0.0
    median_secs: Secs = 0.0
    max_secs: Secs = 0.0


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one rank.

    Attributes:
        step: the last step passed to `save`.
        step_age_secs: how long before the event that was; null: not known.
        blocked_secs: how long `save`, `finish` and `close` have blocked the training thread, since
            the manager was opened.
        blocked_after_secs: the part of it after that step.
        waiting_secs: how long the training had waited until that step, since the manager was
            opened, as it reported with `manager.waiting`, by reason (`data`, `evaluation`,
            `other`); with `compilation` how long JAX or PyTorch compiled otherwise.
        waiting_after_secs: how long it has waited after that step.
    """

    step: Step
    step_age_secs: Secs | None = None
    blocked_secs: Secs = 0.0
    blocked_after_secs: Secs = 0.0
    waiting_secs: dict[str, Secs] = {}
    waiting_after_secs: dict[str, Secs] = {}


# The agent, the attempt and its processes.


class AgentStarted(Event, frozen=True, kw_only=True, tag="agent_started"):
    """The agent's process begins."""

    pid: int


class AgentLeft(Event, frozen=True, kw_only=True, tag="agent_left"):
    """The agent's process ends."""

    pid: int


class RamAdopted(Event, frozen=True, kw_only=True, tag="adopted"):
    """A new agent found checkpoints in RAM."""

    checkpoints: tuple[str, ...]


class AttemptStarted(Event, frozen=True, kw_only=True, tag="attempt_started"):
    """An attempt has begun; written on the host of rank 0.

    Attributes:
        pid: the process of rank 0.
        processes: the number of processes of the job.
        origin_step: the step of the checkpoint from which it continues; null: from none.
        origin_attempt: the attempt that saved that checkpoint.
    """

    pid: int
    processes: Count
    origin_step: Step | None = None
    origin_attempt: AttemptNumber | None = None


class AttemptBranched(Event, frozen=True, kw_only=True, tag="attempt_branched"):
    """The same processes begin another attempt from an older checkpoint; written on each host.

    Attributes:
        origin_step: as in `attempt_started`.
        origin_attempt: as in `attempt_started`.
    """

    origin_step: Step | None = None
    origin_attempt: AttemptNumber | None = None


class ManagerOpened(Event, frozen=True, kw_only=True, tag="manager_opened"):
    """A trainer has opened its manager.

    Attributes:
        rank: its rank.
        pid: its process.
        process_secs: the age of the process when it began to open the manager.
        secs: how long opening took.
        launchers: what has started the process, by the names of `HOLDFAST_LAUNCHER`; the innermost
            first.
        restarts: how often a launcher that counts it has started the job again. The count of
            `torchrun` is that of one node.
    """

    rank: RankNumber
    pid: int
    process_secs: Secs
    secs: Secs
    launchers: tuple[str, ...] = ()
    restarts: dict[str, Count] = {}


class FirstStep(Event, frozen=True, kw_only=True, tag="first_step"):
    """A trainer called `save` for the first time after opening or resuming.

    Attributes:
        rank: its rank.
        step: the step.
        waiting_secs: as in `progress`.
    """

    rank: RankNumber
    step: Step
    waiting_secs: dict[str, Secs] = {}


class StepProgress(Event, frozen=True, kw_only=True, tag="progress"):
    """How far the host's trainers are, every 10 s.

    Attributes:
        ranks: the position of each rank of this host.
        quiet: the steps since the last `progress` during which no checkpoint was taken or written,
            or for less than a hundredth of the step.
        sealing: the steps during which a checkpoint was taken.
        writing: the other steps, during which one was written to the durable tier.
        inflation_secs: by how much the steps beside checkpoints were longer than the median of
            quiet ones, by `sealing` and `writing`; each at most by the time of the checkpoint
            within it. Less than 0 by chance; null: fewer than 8 quiet steps are known.
        durable_requests: the requests of the agent to the durable tier since its start; null: the
            tier is no service.
        pulled_bytes: the bytes that the agent has copied from other hosts' RAM since its start.
    """

    ranks: dict[RankNumber, RankPosition]
    quiet: StepTimes = StepTimes()
    sealing: StepTimes = StepTimes()
    writing: StepTimes = StepTimes()
    inflation_secs: dict[str, float] | None = None
    durable_requests: Count | None = None
    pulled_bytes: Bytes = 0


class PreemptionNoticed(Event, frozen=True, kw_only=True, tag="preempted"):
    """A trainer received a signal that announces a preemption.

    Attributes:
        rank: its rank.
        last_step: the last step passed to `save`; null: none.
    """

    rank: RankNumber
    last_step: Step | None = None


class TrainerLeft(Event, frozen=True, kw_only=True, tag="trainer_left"):
    """A trainer closed its manager.

    Attributes:
        rank: its rank.
        pid: its process.
        last_step: the last step passed to `save`; null: none.
        blocked_secs: as in `progress`.
        after_error: it did so because an exception had left its `with` block.
    """

    rank: RankNumber
    pid: int
    last_step: Step | None = None
    blocked_secs: Secs = 0.0
    after_error: bool = False


class TrainerLost(Event, frozen=True, kw_only=True, tag="trainer_lost"):
    """A trainer's process ended without closing its manager.

    Attributes:
        rank: its rank.
        pid: its process.
        last_step: the last step passed to `save`; null: none.
        blocked_secs: as in `progress`.
        accepted_step: the newest step whose save was accepted; null: none.
    """

    rank: RankNumber
    pid: int
    last_step: Step | None = None
    blocked_secs: Secs = 0.0
    accepted_step: Step | None = None


class RanksLost(Event, frozen=True, kw_only=True, tag="ranks_lost"):
    """Trainers of another host ended, or the host is lost.

    Attributes:
        of_host: that host.
        ranks: the ranks.
        closed: whether they closed their managers.
    """

    of_host: str
    ranks: tuple[RankNumber, ...]
    closed: bool


class AttemptFenced(Event, frozen=True, kw_only=True, tag="fenced"):
    """A newer attempt has taken the run over."""

    by_attempt: AttemptNumber
    reason: str


class CommandEnded(Event, frozen=True, kw_only=True, tag="command_ended"):
    """The command of a `holdfast run` has ended otherwise than finished; written on its host.

    Attributes:
        cause: why: `preempted`, `stopped`, `lost`, `killed`, `memory`, `nan`, `disk`, `hang`,
            `error`.
        code: its exit code; 128 + N if signal N ended it.
        reason: what is known of the cause.
        last_step: the last step before it, where the cause belongs to a step; null: it does not.
        lost_host: the other host that was lost; empty: none.
        restarts: how often the command had been started again before.
        restart_in_secs: when it is started again; null: it is not.
        stopped_because: why it is not, though failures are restarted; empty: they are not.
        stacks: the file of the run with the stacks of a hang; empty: none.
    """

    cause: str
    code: int
    reason: str
    last_step: Step | None = None
    lost_host: str = ""
    restarts: Count = 0
    restart_in_secs: Secs | None = None
    stopped_because: str = ""
    stacks: str = ""


# Checkpoints.


class SaveRequested(Event, frozen=True, kw_only=True, tag="save_requested"):
    """A save was requested and its target step was set."""

    target_step: Step
    reason: str


class IntervalChosen(Event, frozen=True, kw_only=True, tag="interval_chosen"):
    """A policy with `goodput="auto"` saves in another interval from now on.

    Attributes:
        tier: the tier: `ram`, `durable`.
        interval_secs: the time from one checkpoint to the next.
        cost_secs: by how much a checkpoint lengthens the training, as measured.
        failures_per_hour: the failures for which the tier is the nearest one.
    """

    tier: str
    interval_secs: Secs
    cost_secs: Secs
    failures_per_hour: Annotated[float, msgspec.Meta(ge=0)]


class PartSaved(CheckpointEvent, frozen=True, kw_only=True, tag="part_saved"):
    """A rank has sealed its part.

    Attributes:
        rank: the rank.
        tier: where the part is (`ram`, `durable`).
        blocked_secs: how long the call of `save` blocked the training thread.
        secs: the time from that call to the sealed part.
        bytes: the bytes that were written.
        reused_bytes: the bytes of images that were written for earlier checkpoints.
    """

    is_of_saves = True

    rank: RankNumber
    tier: str
    blocked_secs: Secs
    secs: Secs
    bytes: Bytes
    reused_bytes: Bytes = 0


class CheckpointSealed(CheckpointEvent, frozen=True, kw_only=True, tag="sealed"):
    """Every part is sealed: the checkpoint is complete.

    Attributes:
        tier: where its last part is.
    """

    is_of_saves = True

    tier: str


class CheckpointProtected(CheckpointEvent, frozen=True, kw_only=True, tag="protected"):
    """Each part is in enough failure domains; of several hosts only."""

    is_of_saves = True


class CheckpointCommitted(CheckpointEvent, frozen=True, kw_only=True, tag="committed"):
    """It is durable.

    Attributes:
        by: `save`, or `recovery` of what an interrupted attempt left.
        bytes: the size of its images; null after a recovery.
        secs: how long writing took; null after a recovery, and where trainers wrote all parts there
            themselves (`part_saved` has how long).
    """

    is_of_saves = True

    by: str = "save"
    bytes: Bytes | None = None
    secs: Secs | None = None


class CheckpointFailed(CheckpointEvent, frozen=True, kw_only=True, tag="failed"):
    """It could not be taken or made durable.

    Attributes:
        rank: the rank whose part is missing; null: none.
        reason: why.
    """

    rank: RankNumber | None = None
    reason: str


class CheckpointDropped(CheckpointEvent, frozen=True, kw_only=True, tag="dropped"):
    """It was dropped before it was complete."""

    is_of_saves = True

    reason: str


class CheckpointDeleted(CheckpointEvent, frozen=True, kw_only=True, tag="deleted"):
    """It was removed.

    Attributes:
        reason: `preservation`, or `asked`: by a call.
    """

    is_of_saves = True

    reason: str


class CheckpointCleared(CheckpointEvent, frozen=True, kw_only=True, tag="cleared"):
    """The remains of an interrupted save were removed."""

    is_of_saves = True


class CheckpointUploaded(CheckpointEvent, frozen=True, kw_only=True, tag="uploaded"):
    """A checkpoint is committed in the remote tier.

    Attributes:
        bytes: the size of the images that were written there.
        hosts: how many hosts wrote parts.
        secs: the time from the first byte to the commit.
    """

    bytes: Bytes
    hosts: Count = 1
    secs: Secs


class UploadFailed(CheckpointEvent, frozen=True, kw_only=True, tag="upload_failed"):
    """A checkpoint cannot be copied to the remote tier now; reported once until one is.

    Attributes:
        reason: why.
    """

    reason: str


class RemoteDeleted(CheckpointEvent, frozen=True, kw_only=True, tag="remote_deleted"):
    """A checkpoint was removed from the remote tier.

    Attributes:
        reason: `preservation`, or `asked`: by a call.
    """

    reason: str


class CheckpointGivenUp(CheckpointEvent, frozen=True, kw_only=True, tag="given_up"):
    """An attempt has begun from an older checkpoint than this one, which was complete.

    Attributes:
        status: what this one was.
        reason: why it is not used.
    """

    status: str
    reason: str


class CopyFailed(CheckpointEvent, frozen=True, kw_only=True, tag="copy_failed"):
    """A part could not be pulled from another host; repeats are reported only after a success.

    Attributes:
        rank: the part's rank.
        source: the other host.
        reason: why.
    """

    rank: RankNumber
    source: str
    reason: str


# Restores.


class StateEvent(CheckpointEvent, frozen=True, kw_only=True):
    """An event about a state that a trainer has read from a checkpoint.

    Attributes:
        rank: the trainer's rank.
        sources: the bytes read, by tier: `ram` of this host, `peer`, `durable`.
        secs: the time from the call to the state.
        skipped: (step, attempt, reason) of newer checkpoints that could not be read; 20 at most.
        passed_over: bad copies in whose place others were read; 20 at most.
    """

    rank: RankNumber
    sources: dict[str, Bytes]
    secs: Secs
    skipped: tuple[tuple[Step, AttemptNumber, str], ...] = ()
    passed_over: tuple[str, ...] = ()


class StateRead(StateEvent, frozen=True, kw_only=True, tag="read"):
    """A trainer has read a checkpoint without moving the run."""


class StateRestored(StateEvent, frozen=True, kw_only=True, tag="restored"):
    """A trainer continues from a checkpoint.

    Attributes:
        by: the call, `resume` or `rewind`.
    """

    by: str = "resume"


# Problems.


class RamUnavailable(Event, frozen=True, kw_only=True, tag="ram_unavailable"):
    """RAM fails: checkpoints go straight to the durable tier, or its room is not freed.

    Attributes:
        rank: the rank that saw it; null: the agent.
        reason: why.
    """

    rank: RankNumber | None = None
    reason: str


class ReplicasDiffer(CheckpointEvent, frozen=True, kw_only=True, tag="replicas_differ"):
    """A rank holds something else than what another rank has saved of the same arrays.

    Attributes:
        rank: the rank that compared.
        owner: the rank that saved them.
        holders: the ranks that hold them.
        arrays: the names of the arrays, or of their chunks; 20 at most.
        start_bytes: where the first block that differs begins, within the first of these.
        stop_bytes: where it ends.
        digest: the digest of that block on the rank that compared.
        owner_digest: its digest in what was saved.
        blocks: how many blocks differ.
        checked: how many were compared.
    """

    rank: RankNumber
    owner: RankNumber
    holders: tuple[RankNumber, ...]
    arrays: tuple[str, ...]
    start_bytes: Bytes
    stop_bytes: Bytes
    digest: str
    owner_digest: str
    blocks: Count
    checked: Count


class LeftUnfinished(Event, frozen=True, kw_only=True, tag="left_unfinished"):
    """A trainer closed its manager before its saves had ended: they may still become durable.

    Attributes:
        rank: its rank.
        steps: their steps; 20 at most.
        newest_step: the newest step known to be safe, which the next start has at least; null:
            none.
        reason: why it did not wait longer.
    """

    rank: RankNumber
    steps: tuple[int, ...]
    newest_step: int | None
    reason: str


class RecordMended(Event, frozen=True, kw_only=True, tag="mended"):
    """A damaged record of the run or of an attempt was repaired from its copy."""

    key: str


class PeersUnavailable(Event, frozen=True, kw_only=True, tag="peers_unavailable"):
    """The agent cannot serve its peers; it continues without."""

    reason: str


class PeerSilent(Event, frozen=True, kw_only=True, tag="host_silent"):
    """A host of the attempt has sent nothing for a while; reported once, by the leader.

    Attributes:
        of_host: that host.
        secs: for how long.
    """

    of_host: str
    secs: Secs


class PeerHeard(Event, frozen=True, kw_only=True, tag="host_heard"):
    """A host that was silent reports again.

    Attributes:
        of_host: that host.
    """

    of_host: str


class LeaderReplaced(Event, frozen=True, kw_only=True, tag="leader_changed"):
    """This host follows another leader, because the one before is silent or is back.

    Attributes:
        leader: the host that leads now.
        before: the one before.
    """

    leader: str
    before: str


class ProtectionDelayed(Event, frozen=True, kw_only=True, tag="protection_late"):
    """Saves wait, and no checkpoint was protected for a while; once, until one is.

    Attributes:
        first_step: the lowest step that waits.
        last_step: the highest one.
        secs: how long saves have waited.
    """

    first_step: Step
    last_step: Step
    secs: Secs


class RecoveryFailed(Event, frozen=True, kw_only=True, tag="recovery_failed"):
    """The durable tier refused to finish what an interrupted attempt left."""

    reason: str


class PreservationFailed(Event, frozen=True, kw_only=True, tag="preservation_failed"):
    """The durable tier refused a removal."""

    reason: str


class DurableUnreadable(Event, frozen=True, kw_only=True, tag="durable_unreadable"):
    """The durable tier refused to list the attempts."""

    reason: str


class EventsLost(Event, frozen=True, kw_only=True, tag="events_lost"):
    """Events of this host were not written, because storage failed or was too slow.

    Attributes:
        count: how many.
        reason: the last failure.
    """

    count: Count
    reason: str


EVENTS: tuple[type[Event], ...] = (
    AgentStarted,
    RamAdopted,
    AttemptStarted,
    AttemptBranched,
    ManagerOpened,
    StateRestored,
    StateRead,
    FirstStep,
    StepProgress,
    PreemptionNoticed,
    TrainerLeft,
    TrainerLost,
    RanksLost,
    AttemptFenced,
    CommandEnded,
    AgentLeft,
    SaveRequested,
    IntervalChosen,
    PartSaved,
    CheckpointSealed,
    CheckpointProtected,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointDropped,
    CheckpointDeleted,
    CheckpointCleared,
    CheckpointUploaded,
    UploadFailed,
    RemoteDeleted,
    CheckpointGivenUp,
    CopyFailed,
    RamUnavailable,
    ReplicasDiffer,
    LeftUnfinished,
    RecordMended,
    PeersUnavailable,
    PeerSilent,
    PeerHeard,
    LeaderReplaced,
    ProtectionDelayed,
    RecoveryFailed,
    PreservationFailed,
    DurableUnreadable,
    EventsLost,
)
"""All events, in the order of their documentation."""

TrainerEvent = (
    ManagerOpened | StateRestored | StateRead | RamUnavailable | ReplicasDiffer | LeftUnfinished
)
"""The events that trainers report through their agent."""
ReportedEvent = TrainerEvent | CommandEnded
"""Those, and the event of `holdfast run`."""


def event_name(kind: type[Event] | Event) -> str:
    """Return the name of an event, which tags its lines."""
    return str(kind.__struct_config__.tag)
