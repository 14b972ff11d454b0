"""Hold the state that the agent's parts share. The event loop's thread owns all of it.

The stores are the exception: other threads use the durable store, and read the RAM store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.clock import Clock
from holdfast.coordination.inputs import Published
from holdfast.coordination.messages import SECS_MAX
from holdfast.engine.lifecycle.run import check_run
from holdfast.engine.tiers.remote_checkpoints import RemoteCheckpoints
from holdfast.format.names import CheckpointId
from holdfast.format.part_layout import REMOTE
from holdfast.host.agent_directory import WORDS, ram_folder
from holdfast.host.config import AgentConfig
from holdfast.host.control_block import NO_STEP, ControlBlock, cost_cell, create_cells, step_cell
from holdfast.host.local_replicas import LocalReplicas
from holdfast.host.notices import NoticeBoard
from holdfast.host.slot_allocator import SlotAllocator
from holdfast.host.step_meter import StepMeter
from holdfast.host.trainer_group import TrainerGroup
from holdfast.observe.events.schema import Event
from holdfast.observe.events.uploaded_segments import SegmentUploads, uploads_for
from holdfast.observe.events.writer import EventWriter
from holdfast.observe.failure_history import FailureHistory
from holdfast.observe.metrics.measures import Measures
from holdfast.policy import preservation_policy, save_decision_policy
from holdfast.store.durable import DurableStore
from holdfast.store.file_system import FileSystem
from holdfast.store.location import open_durable
from holdfast.store.ram import RamStore
from holdfast.store.slots import SlotPool

NANOSECONDS = 1e9
REMOTE_ADVICE = "training goes on in the directory; the next start needs another remote tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The shares of a tier's policies that the agent evaluates."""

    save: save_decision_policy.SaveDecisionPolicy | None = None
    preserve: preservation_policy.PreservationPolicy | None = None
    user_preserves: bool = False


@dataclass(slots=True, kw_only=True)
class RemoteTarget:
    """The run's remote tier, and the uploads of events to it.

    The policies are set on rank 0's host, once its attempt has begun.
    """

    place: str
    store: DurableStore
    checkpoints: RemoteCheckpoints
    uploads: SegmentUploads
    save: save_decision_policy.SaveDecisionPolicy | None = None
    preserve: preservation_policy.PreservationPolicy | None = None


@dataclass(slots=True)
class AgentState:
    """One agent's state. `group` are the trainers of the present attempt; None without any."""

    config: AgentConfig
    clock: Clock
    files: FileSystem
    control: ControlBlock
    events: EventWriter
    measures: Measures
    failures: FailureHistory
    step_meter: StepMeter
    durable: DurableStore
    ram: RamStore
    pool: SlotPool
    slots: SlotAllocator
    group: TrainerGroup | None = None
    durable_policies: Policies = field(default_factory=Policies)
    ram_policies: Policies = field(default_factory=Policies)
    remote: RemoteTarget | None = None
    uploading: frozenset[CheckpointId] = frozenset()
    """The checkpoints that are copied to the remote tier, which preservation spares."""
    knows_policies: bool = False
    """Whether rank 0 has sent the policies to this agent."""
    has_ram: bool = True
    linger_secs: float = 0.0
    peer_address: str | None = None
    metrics_url: str | None = None
    """Where the agent serves metrics; None: it does not."""
    notices: NoticeBoard = field(default_factory=NoticeBoard)
    local_replicas: LocalReplicas = field(default_factory=LocalReplicas)
    pulled_bytes: int = 0
    """Bytes read from other hosts' images for replicas on this host, since the agent started."""
    durable_at_secs: float | None = None
    """The monotonic time at which the checkpoint under way will be durable, if it takes as long as
    the last one."""
    sealing_secs: float | None = None
    """How long a rank here took to seal its last part."""
    durable_secs: float | None = None
    """How long the last checkpoint took from its parts in RAM to its commit."""
    filling: dict[int, CheckpointId] = field(default_factory=dict)
    wake: Callable[[], None] = lambda: None
    has_place: Callable[[], bool] = lambda: True

    @property
    def run(self) -> str:
        """The path where the run was found last, or its URL."""
        return self.durable.home.location_text

    @property
    def folder(self) -> Path:
        """The agent's own folder."""
        return Path(self.config.folder)

    def use_remote(self, place: str | None) -> None:
        """Use the remote tier at `place` from now on; None: the run has none.

        Raises:
            InvalidArgumentError: it is a URL, and obstore is not installed or not configured.
        """
        if self.remote is not None and self.remote.place != place:
            self.events.end_uploads(self.remote.uploads)
            self.remote = None
        if place is not None and self.remote is None:
            store = open_durable(place, self.clock, self.files, tier=REMOTE)
            uploads = SegmentUploads(
                self.durable.home,
                store,
                self.config.host,
                self.clock,
                lambda: check_run(store, place, self.config.run_id, REMOTE_ADVICE),
            )
            self.events.begin_uploads(uploads)
            checkpoints = RemoteCheckpoints(self.durable, store)
            self.remote = RemoteTarget(
                place=place, store=store, checkpoints=checkpoints, uploads=uploads
            )

    def published(self) -> Published:
        """Return the trainers' published steps and save cost, read now."""
        present = self.group.present if self.group is not None else []
        values = self.control.cells
        steps = [values[step_cell(member.seat)] for member in present]
        if not steps:
            return Published()
        cost = max(values[cost_cell(member.seat)] for member in present)
        # Trainers write these cells, so their values are bounded here.
        cost_secs = min(cost / NANOSECONDS, SECS_MAX) if cost >= 0 else None
        return Published(max(NO_STEP, *steps), min(steps), cost_secs)


def open_state(config: AgentConfig, clock: Clock, files: FileSystem) -> AgentState:
    """Create the state of an agent that has just got its place.

    Raises:
        OSError: its folder has no room for its files.
    """
    folder = Path(config.folder)
    durable = open_durable(config.run, clock, files)
    ram_root = ram_folder(folder)
    ram_root.mkdir(mode=0o700, exist_ok=True)
    pool = SlotPool(ram_root, None, clock, files)
    ram = RamStore(ram_root, pool.reserve, clock, files)
    pool.on_evicted = ram.release_deleted
    control = create_cells(folder / WORDS)
    measures = Measures(clock)
    failures = FailureHistory()

    def on_event(event: Event) -> None:
        measures.note_event(event)
        failures.note_event(event)

    uploads = uploads_for(durable, config.host, clock)
    events = EventWriter(durable.home, config.host, clock, on_event, uploads)
    state = AgentState(
        config=config,
        clock=clock,
        files=files,
        control=control,
        events=events,
        measures=measures,
        failures=failures,
        step_meter=StepMeter(control, events, clock, measures),
        durable=durable,
        ram=ram,
        pool=pool,
        slots=SlotAllocator(pool),
        linger_secs=config.linger_secs,
    )
    state.step_meter.traffic = lambda: (state.durable.request_count, state.pulled_bytes)
    return state
