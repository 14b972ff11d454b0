"""What a trainer shares with its agent: its place in an attempt, and its cells in shared memory.

The training thread writes them at every step, without a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from holdfast.format.names import AttemptId, CheckpointId
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import WORDS
from holdfast.host.wire.control_block import (
    NO_STEP,
    ControlBlock,
    WaitCells,
    accepted_cell,
    blocked_before_cell,
    blocked_cell,
    blocked_step_cell,
    call_cell,
    cost_cell,
    decided_cell,
    first_step_cell,
    first_time_cell,
    met_cell,
    met_value,
    notice_cell,
    step_cell,
    step_time_cell,
    wait_cells,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """The seat and the folder that the agent assigned to this trainer."""

    folder: Path
    control: ControlBlock
    attempt: AttemptId
    origin: CheckpointId | None
    seat: int
    ram_folder: Path | None
    cursor: int
    """The position of the first notice that concerns this trainer's group."""

    # Computed once, because the training thread reads them at every step.
    number: int = field(init=False)
    """The number of the attempt, which the control block's cell has."""
    step_cell: int = field(init=False)
    """The control block's cell for the step that this trainer has published."""
    step_time_cell: int = field(init=False)
    """The cell for the time at which it was published."""
    decided_cell: int = field(init=False)
    """The cell for the newest step for which it is decided whether to save it."""
    notice_cell: int = field(init=False)
    """The cell that is 1 once this trainer has received a preemption signal."""
    cost_cell: int = field(init=False)
    """The cell for the cost of a checkpoint, in nanoseconds."""
    waits: WaitCells = field(init=False)
    """The cells for the waits of the training."""
    blocked_cell: int = field(init=False)
    """The cell for the time for which saves have blocked the training."""
    blocked_before_cell: int = field(init=False)
    """The cell for that time before the step in the next one."""
    blocked_step_cell: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.attempt.number)
        object.__setattr__(self, "step_cell", step_cell(self.seat))
        object.__setattr__(self, "step_time_cell", step_time_cell(self.seat))
        object.__setattr__(self, "decided_cell", decided_cell(self.seat))
        object.__setattr__(self, "notice_cell", notice_cell(self.seat))
        object.__setattr__(self, "cost_cell", cost_cell(self.seat))
        object.__setattr__(self, "waits", wait_cells(self.seat))
        object.__setattr__(self, "blocked_cell", blocked_cell(self.seat))
        object.__setattr__(self, "blocked_before_cell", blocked_before_cell(self.seat))
        object.__setattr__(self, "blocked_step_cell", blocked_step_cell(self.seat))

    def publish_first_step(self, step: int, time: datetime) -> None:
        """Publish the first step after opening or resuming."""
        cells = self.control.cells
        cells[first_time_cell(self.seat)] = int(time.timestamp() * 1e6)
        cells[first_step_cell(self.seat)] = step

    def publish_decision(self, step: int, met: Collection[int]) -> None:
        """Publish that it is decided whether to save `step`, and the target cells that it meets."""
        if met:
            self.control.cells[met_cell(self.seat)] = met_value(step, met)
        self.control.cells[self.decided_cell] = step

    def publish_accepted(self, step: int) -> None:
        """Publish the step of a save that is accepted."""
        self.control.cells[accepted_cell(self.seat)] = step

    def publish_position(self, step: int) -> None:
        """Publish that the training goes on after `step`, `NO_STEP`: from its beginning."""
        cells = self.control.cells
        cells[self.decided_cell] = cells[self.step_cell] = step
        cells[accepted_cell(self.seat)] = NO_STEP
        cells[met_cell(self.seat)] = 0

    def publish_call(self, since_ns: int) -> int:
        """Publish since when a call of the manager waits, 0: none does; return what was there."""
        cells, cell = self.control.cells, call_cell(self.seat)
        before, cells[cell] = cells[cell], since_ns
        return before

    def announce_preemption(self) -> None:
        """Publish that this trainer has a notice of a preemption."""
        # The memory is released where the manager was abandoned in the middle of its end. No agent
        # reads it then, and an error would end the training loop.
        with contextlib.suppress(ValueError):
            self.control.cells[self.notice_cell] = 1

    def begin_blocked(self) -> None:
        """Publish that what is added to the blocked time from now on is after the present step."""
        cells, step = self.control.cells, self.control.cells[self.step_cell]
        if cells[self.blocked_step_cell] != step:
            cells[self.blocked_before_cell] = cells[self.blocked_cell]
            cells[self.blocked_step_cell] = step

    def add_blocked(self, secs: float) -> None:
        """Add a time for which a save has blocked the training thread."""
        self.control.cells[self.blocked_cell] += int(secs * 1e9)

    def begin_wait(self, reason: int, now_secs: float) -> None:
        """Publish that the training waits since `now_secs`, for a reason of `WAIT_REASONS`."""
        cells, waits = self.control.cells, self.waits
        self._keep_waits()
        cells[waits.reason] = reason
        cells[waits.since] = int(now_secs * 1e9)

    def end_wait(self, reason: int, secs: float) -> None:
        """Publish that the training waits no more, and add the duration of the wait."""
        cells, waits = self.control.cells, self.waits
        cells[waits.since] = 0
        cells[waits.ended.start + reason] += int(secs * 1e9)

    def add_wait(self, reason: int, secs: float) -> None:
        """Publish a wait that has ended after the present step."""
        self._keep_waits()
        self.control.cells[self.waits.ended.start + reason] += int(secs * 1e9)

    def _keep_waits(self) -> None:
        """Keep the durations of the waits until the present step, before one after it is added."""
        cells, waits = self.control.cells, self.waits
        step = cells[self.step_cell]
        if cells[waits.step] != step:
            cells[waits.before] = cells[waits.ended]
            cells[waits.step] = step


def place_of(folder: Path, attached: protocol.Attached) -> AgentPlace:
    """Return the place that an agent in `folder` has assigned."""
    return AgentPlace(
        folder=folder,
        control=ControlBlock(folder / WORDS),
        attempt=attached.attempt,
        origin=attached.origin,
        seat=attached.seat,
        ram_folder=Path(attached.ram_folder) if attached.ram_folder else None,
        cursor=attached.cursor,
    )
