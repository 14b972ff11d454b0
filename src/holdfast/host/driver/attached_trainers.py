"""Hold the agent's side of its trainers: their group, what they share, and the notices to them.

Owned by the agent's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from holdfast.coordination.inputs import Published, TargetWritten
from holdfast.coordination.messages import SECS_MAX, TargetKind
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.host.metering.step_meter import StepMeter
from holdfast.host.wire.control_block import (
    ATTEMPT,
    CELL_OF,
    NEVER,
    NO_STEP,
    PREEMPTION_CONFIRMED,
    TARGET_DURABLE,
    TARGET_RAM,
    ControlBlock,
    call_cell,
    cost_cell,
    decided_cell,
    first_step_cell,
    met_cell,
    met_step,
    notice_cell,
    step_cell,
    wait_cells,
)
from holdfast.host.wire.group_record import TrainerProcess
from holdfast.host.wire.protocol import Notice, Notices
from holdfast.local_agent.client import is_suspended
from holdfast.observe.events.schema import WAIT_REASONS
from holdfast.policy.preservation_policy import PreservationPolicy
from holdfast.policy.save_decision_policy import SaveDecisionPolicy

KEPT_COUNT = 10_000
WAIT_SECS = 20.0


class NoticeBoard:
    """The newest `KEPT_COUNT` notices; each trainer follows them with its own cursor."""

    def __init__(self) -> None:
        self._notices: deque[Notice] = deque(maxlen=KEPT_COUNT)
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """The number of notices posted so far; as a cursor, it skips all of them."""
        return self._count

    def post(self, notice: Notice) -> None:
        """Add a notice, and wake all waiting readers."""
        self._notices.append(notice)
        self._count += 1
        # A new event per notice: waiters keep the old one, and a shared one would have to be
        # cleared while they wake.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, cursor: int) -> Notices:
        """Return the notices after `cursor`; wait up to `WAIT_SECS` if there are none."""
        if cursor >= self._count:
            try:
                async with asyncio.timeout(WAIT_SECS):
                    await self._changed.wait()
            except TimeoutError:
                return Notices(cursor=self._count, notices=())
        new_count = min(self._count - min(cursor, self._count), len(self._notices))
        new = list(self._notices)[len(self._notices) - new_count :]
        return Notices(cursor=self._count, notices=tuple(new))


NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The shares of a tier's policies that the agent evaluates."""

    save: SaveDecisionPolicy | None = None
    preserve: PreservationPolicy | None = None
    user_preserves: bool = False


@dataclass(slots=True, kw_only=True)
class JobSettings:
    """What the processes of the job have set, once their attempt has begun.

    Attributes:
        durable, ram: rank 0's policies, which hold for the whole run.
        knows_policies: rank 0 has sent its policies to this agent.
        has_ram: the job uses the RAM tier.
        linger_secs: how long the agent stays after its last trainer has ended, if one died.
    """

    durable: Policies = field(default_factory=Policies)
    ram: Policies = field(default_factory=Policies)
    knows_policies: bool = False
    has_ram: bool = True
    linger_secs: float


@dataclass(slots=True)
class TrainerGroup:
    """The trainers on this host that belong together.

    Attributes:
        group: the random token that rank 0 drew.
        attempt: `NO_ATTEMPT` until it has begun.
        leader: the host of rank 0.
        left: the ranks that detached before they ended.
        lost: the ranks that ended without detaching.
        cursor: where the notices that concern the group begin.
    """

    group: str
    attempt: AttemptId
    count: int
    leader: str
    origin: CheckpointId | None = None
    members: dict[int, TrainerProcess] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    cursor: int = 0

    @property
    def is_broken(self) -> bool:
        """Whether a member ended without detaching: the group cannot continue."""
        return bool(self.lost)

    @property
    def present(self) -> list[TrainerProcess]:
        """The attached members, by ascending rank."""
        ended = self.left | self.lost
        return [self.members[rank] for rank in sorted(self.members) if rank not in ended]


class AttachedTrainers:
    """The trainers of the present attempt on this host.

    Attributes:
        control: the cells that the trainers and the agent share.
        notices: what the agent reports to the trainers.
        meter: how far the trainers are.
        job: what their job has set.
        group: the trainers; None without any.
        filling: the checkpoint that each rank copies into its slot now.
    """

    def __init__(
        self, control: ControlBlock, notices: NoticeBoard, meter: StepMeter, job: JobSettings
    ) -> None:
        self.control = control
        self.notices = notices
        self.meter = meter
        self.job = job
        self.group: TrainerGroup | None = None
        self.filling: dict[int, CheckpointId] = {}
        self._last_targets: dict[TargetKind, int] = {}

    @property
    def present(self) -> list[TrainerProcess]:
        """The attached trainers, by ascending rank."""
        return self.group.present if self.group is not None else []

    @property
    def has_notice(self) -> bool:
        """Whether any of the trainers was notified that it will be stopped."""
        return any(self.control.cells[notice_cell(member.seat)] for member in self.present)

    def published(self) -> Published:
        """Return the trainers' published steps and save cost, read now."""
        present, values = self.present, self.control.cells
        steps = [values[step_cell(member.seat)] for member in present]
        if not steps:
            return Published()
        cost = max(values[cost_cell(member.seat)] for member in present)
        # Trainers write these cells, so their values are bounded here.
        cost_secs = min(cost / NANOSECONDS, SECS_MAX) if cost >= 0 else None
        return Published(max(NO_STEP, *steps), min(steps), cost_secs)

    def step_of(self, member: TrainerProcess) -> int | None:
        """Return the step that a trainer has published; None before the first."""
        step = self.control.cells[step_cell(member.seat)]
        return None if step == NO_STEP else step

    def busy_of(self, member: TrainerProcess) -> str:
        """Return why a trainer may make no step for a while: a key of `BUSY_WORDS`, or empty."""
        cells, waits = self.control.cells, wait_cells(member.seat)
        if is_suspended(member.pid):
            return "held"
        if cells[call_cell(member.seat)]:
            return "call"
        reason = cells[waits.reason]
        if (
            cells[waits.since]
            and 0 <= reason < len(WAIT_REASONS)
            and WAIT_REASONS[reason] != "data"
        ):
            return WAIT_REASONS[reason]
        first = cells[first_step_cell(member.seat)]
        return "" if NO_STEP < first < cells[step_cell(member.seat)] else "starting"

    def show_attempt(self, number: int) -> None:
        """Write the number of the newest attempt, which each trainer reads at its next step."""
        self.control.cells[ATTEMPT] = number

    # Targets. Each trainer compares its step with their cells.

    def set_target(self, kind: TargetKind, step: int) -> None:
        """Write the step at which all ranks save."""
        self.control.cells[CELL_OF[kind]] = step
        self._last_targets[kind] = step

    def is_deciding(self, step: int) -> bool:
        """Return whether a trainer has come to `step` and may be about to publish that it saves it.

        Until then its cells do not show whether it has read a target of that step.
        """
        cells = self.control.cells
        return any(
            cells[decided_cell(member.seat)] < step <= cells[step_cell(member.seat)]
            for member in self.present
        )

    def look_at_target(self, kind: TargetKind, step: int) -> TargetWritten:
        """Return where the trainers are after a target was written, and whether one missed it."""
        cells, highest, is_missed, read_from = self.control.cells, NO_STEP, False, step
        # The only rank of a job meets a target at a later step too: no other has to save the same.
        is_alone = self.group is not None and self.group.count == 1
        for member in self.present:
            published = cells[step_cell(member.seat)]
            met = met_step(cells[met_cell(member.seat)], CELL_OF[kind])
            highest = max(highest, published)
            if published >= step and not (met == step or (is_alone and met > step)):
                is_missed |= not is_alone
                read_from = max(read_from, published + 1)
        return TargetWritten(kind, step, highest, is_missed, read_from)

    def confirm_target(self, step: int) -> None:
        """Write that every host has accepted the preemption target: ranks may stop there."""
        self.control.cells[PREEMPTION_CONFIRMED] = step

    def clear_target(self, kind: TargetKind) -> None:
        """Remove a target that was reached, or cannot be."""
        self.control.cells[CELL_OF[kind]] = NEVER
        if kind is TargetKind.PREEMPTION:
            self.control.cells[PREEMPTION_CONFIRMED] = NEVER

    @property
    def has_target(self) -> bool:
        """Whether a cell holds a target at which a policy wants a checkpoint."""
        cells = self.control.cells
        return min(cells[TARGET_DURABLE], cells[TARGET_RAM]) != NEVER

    def last_target(self, kinds: Collection[TargetKind]) -> int:
        """Return the step of the newest target of these kinds, reached or not; -1 without one."""
        return max((s for k, s in self._last_targets.items() if k in kinds), default=NO_STEP)

    def forget_targets(self) -> None:
        """Forget the targets so far: steps may restart below them."""
        self._last_targets.clear()
