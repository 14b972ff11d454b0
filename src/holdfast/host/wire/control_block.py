"""Share cells between trainers and their agent: 64-bit ints in one mapped file.

Invariants:
- Each cell has one writer. The agent writes the attempt and the targets; each trainer writes the
  cells of its own seat.
- An aligned cell is read and written whole, so no reader sees half of one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from holdfast.coordination.messages import TargetKind
from holdfast.store.files.whole_file import replace_file

NEVER = 2**62
"""A target that no step reaches."""

ATTEMPT = 0
TARGET_DURABLE = 1
TARGET_RAM = 2
TARGET_PREEMPTION = 3
PREEMPTION_CONFIRMED = 4
"""The preemption target, once it is confirmed: ranks that reach it may stop there."""
INCARNATION = 5
"""The number of the newest start of an agent here; see `next_incarnation`."""
CELL_OF = {
    TargetKind.DURABLE: TARGET_DURABLE,
    TargetKind.RAM: TARGET_RAM,
    TargetKind.PREEMPTION: TARGET_PREEMPTION,
}
_TARGET_BITS = len(CELL_OF)
_FIRST_SEAT = 16
_SEAT_CELLS = 24
"""A seat is three cache lines, so that no trainer's writes slow down another's."""
SEAT_COUNT = 1016
_SIZE_BYTES = 8 * (_FIRST_SEAT + _SEAT_CELLS * SEAT_COUNT)

NO_STEP = -1
NO_COST = -1


def next_incarnation(cells: memoryview, now: datetime) -> int:
    """Return a number above those of all earlier starts of agents with these cells.

    It is the time in milliseconds since 1970, unless the host's clock was set back: the folder of
    a host that was lost has new cells. Other hosts order an agent's messages and addresses by it.
    """
    cells[INCARNATION] = max(cells[INCARNATION] + 1, int(now.timestamp() * 1000))
    return cells[INCARNATION]


def step_cell(seat: int) -> int:
    """Return the index of the cell with the newest step published by the trainer in `seat`."""
    return _FIRST_SEAT + _SEAT_CELLS * seat


def notice_cell(seat: int) -> int:
    """Return the index of the cell that is 1 once that trainer has a notice to stop soon."""
    return step_cell(seat) + 1


def cost_cell(seat: int) -> int:
    """Return the index of the cell with a checkpoint's cost in training time there, nanoseconds."""
    return step_cell(seat) + 2


def first_step_cell(seat: int) -> int:
    """Return the index of the cell with the first step after opening or resuming there."""
    return step_cell(seat) + 3


def first_time_cell(seat: int) -> int:
    """Return the index of the cell with the time of that step, in microseconds since 1970.

    The trainer writes it before the step.
    """
    return step_cell(seat) + 4


def blocked_cell(seat: int) -> int:
    """Return the index of the cell with the nanoseconds for which saves have blocked the training.

    They are counted since the manager there was opened.
    """
    return step_cell(seat) + 5


def step_time_cell(seat: int) -> int:
    """Return the index of the cell with the time at which the newest step was published.

    Nanoseconds of the host's monotonic clock; 0: none. The trainer writes it after the step.
    """
    return step_cell(seat) + 6


class WaitCells(NamedTuple):
    """The indices of the cells in which the trainer of one seat reports that the training waits.

    Attributes:
        since: The time since which it waits, in nanoseconds of the host's monotonic clock; 0 while
            it does not wait.
        reason: The reason of that wait, a position in `WAIT_REASONS`.
        ended: Of each reason, the nanoseconds of the ended waits since the manager was opened.
        before: For each reason, the value of `ended` at the step in `step`. The trainer writes both
            before the first wait after a step.
        step: The newest step before the newest wait.
    """

    since: int
    reason: int
    ended: slice
    before: slice
    step: int


def wait_cells(seat: int) -> WaitCells:
    """Return the cells of one seat."""
    first = step_cell(seat)
    return WaitCells(
        since=first + 7,
        reason=first + 8,
        ended=slice(first + 9, first + 13),
        before=slice(first + 13, first + 17),
        step=first + 17,
    )


def blocked_before_cell(seat: int) -> int:
    """Return the index of the cell with the value of `blocked_cell` at the step in the next cell.

    The trainer writes both before the first call that blocks after a step.
    """
    return step_cell(seat) + 18


def blocked_step_cell(seat: int) -> int:
    """Return the index of the cell with the newest step before the newest blocking call there."""
    return step_cell(seat) + 19


def call_cell(seat: int) -> int:
    """Return the index of the cell with the time since which a call of the manager there waits.

    Nanoseconds of the host's monotonic clock; 0 while none does.
    """
    return step_cell(seat) + 20


def accepted_cell(seat: int) -> int:
    """Return the index of the cell with the step of the newest save that was accepted there."""
    return step_cell(seat) + 21


def met_cell(seat: int) -> int:
    """Return the index of the cell with the newest step that meets a target there.

    It is a value of `met_value`, written once the save of that step is decided; 0: none.
    """
    return step_cell(seat) + 22


def decided_cell(seat: int) -> int:
    """Return the index of the cell with the newest step for which that trainer has decided.

    It has read the targets and decided whether it saves that step. It writes `met_cell` before, so
    that a step which is in this cell and not in `met_cell` meets no target.
    """
    return step_cell(seat) + 23


def met_value(step: int, targets: Collection[int]) -> int:
    """Return one number for a step and the target cells that it meets."""
    return step << _TARGET_BITS | sum(1 << target - TARGET_DURABLE for target in targets)


def met_step(value: int, target: int) -> int:
    """Return the step of a value of `met_value` if it meets that target cell, else `NO_STEP`."""
    return value >> _TARGET_BITS if value >> target - TARGET_DURABLE & 1 else NO_STEP


def reset_seat(cells: memoryview, seat: int) -> None:
    """Set the cells of a seat as for a trainer that has published nothing."""
    cells[step_cell(seat)] = cells[first_step_cell(seat)] = NO_STEP
    cells[cost_cell(seat)] = NO_COST
    for cell in {notice_cell(seat), *range(first_time_cell(seat), step_cell(seat + 1))}:
        cells[cell] = 0
    cells[wait_cells(seat).step] = cells[blocked_step_cell(seat)] = NO_STEP
    cells[accepted_cell(seat)] = cells[decided_cell(seat)] = NO_STEP


def copy_seat(old: memoryview, old_seat: int, cells: memoryview, seat: int) -> None:
    """Copy what a trainer has published in `old` to its seat in another control block."""
    first, old_first = step_cell(seat), step_cell(old_seat)
    for offset in range(_SEAT_CELLS):
        cells[first + offset] = old[old_first + offset]


class ControlBlock:
    """The mapped cells; `cells[i]` reads and writes one."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(fd, _SIZE_BYTES)
        finally:
            os.close(fd)
        self.cells = memoryview(self._map).cast("q")

    def close(self) -> None:
        """Unmap the cells."""
        self.cells.release()
        self._map.close()


def create_cells(path: Path) -> ControlBlock:
    """Open the control block at `path`; create it without targets and steps if it is missing.

    Raises:
        OSError: there is no room for it.
    """
    # A file of another size is not ours: reading beyond its end through a mapping kills the
    # process. All of the new file is written: a page that the tmpfs cannot provide later would be a
    # SIGBUS in a trainer.
    if not path.exists() or path.stat().st_size != _SIZE_BYTES:
        content = bytearray(_SIZE_BYTES)
        cells = memoryview(content).cast("q")
        for target in (*CELL_OF.values(), PREEMPTION_CONFIRMED):
            cells[target] = NEVER
        for seat in range(SEAT_COUNT):
            reset_seat(cells, seat)
        replace_file(path, content)
    return ControlBlock(path)
