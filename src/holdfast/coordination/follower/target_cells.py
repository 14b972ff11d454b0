"""The three target cells of a host: their values, and how this host's ranks respond to them.

Invariant: a target is accepted only if, after its cell was written, each rank here had published
only lower steps, or had published that it has met the target: that it saves its step for it. A rank
publishes its step and then reads the cell; the agent writes the cell and then reads the steps. So a
rank that was not seen at or beyond the target will read the target; one that was seen there
publishes what it has decided. The only rank of a job meets a target at whichever step it reads it,
so that its host accepts each one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.coordination.effects import ClearTarget, ConfirmTarget, SetTarget
from holdfast.coordination.inputs import Found, TargetWritten
from holdfast.coordination.messages import NO_STEP, TargetKind, TargetProposal, TargetState
from holdfast.coordination.turn import Turn


@dataclass(slots=True)
class _Cell:
    step: int
    is_accepted: bool | None = None
    highest: int = NO_STEP
    read_from: int = NO_STEP
    is_served: bool = False
    is_confirmed: bool = False


class TargetCells:
    """The targets of one host, by kind."""

    def __init__(self) -> None:
        self._cells: dict[TargetKind, _Cell] = {}

    def adopt_cells(self, turn: Turn, found: Found) -> None:
        """Adopt the cells as the previous agent left them.

        Each target is set again, so that the published steps are read again: whether the previous
        agent had accepted it is unknown.
        """
        for kind, step in found.targets.items():
            is_confirmed = kind is TargetKind.PREEMPTION and found.is_confirmed
            self._cells[kind] = _Cell(step, is_confirmed=is_confirmed)
            turn.act(SetTarget(kind, step))

    def clear_all(self, turn: Turn) -> None:
        """Clear all cells, for a new attempt; also those that only a previous agent knew of."""
        self._cells.clear()
        for kind in TargetKind:
            turn.act(ClearTarget(kind))

    @property
    def is_waiting(self) -> bool:
        """Whether some rank has not reached a target yet."""
        return any(not cell.is_served for cell in self._cells.values())

    def apply_targets(self, turn: Turn, targets: Sequence[TargetProposal]) -> None:
        """Set, confirm and clear cells so that they hold the leader's targets."""
        by_kind = {target.kind: target for target in targets}
        for kind in TargetKind:
            target, cell = by_kind.get(kind), self._cells.get(kind)
            if target is None:
                if cell is not None:
                    del self._cells[kind]
                    turn.act(ClearTarget(kind))
                continue
            if cell is None or cell.step != target.step:
                cell = self._cells[kind] = _Cell(target.step)
                turn.act(SetTarget(kind, target.step))
            # A confirmation is not withdrawn: ranks may have stopped there.
            if target.is_confirmed and not cell.is_confirmed:
                cell.is_confirmed = True
                if kind is TargetKind.PREEMPTION:
                    turn.act(ConfirmTarget(target.step))

    def written(self, item: TargetWritten) -> bool:
        """Apply the steps that were read after the cell was written.

        Returns:
            Whether the target is accepted now. False also for a target that has been replaced.
        """
        cell = self._cells.get(item.kind)
        if cell is None or cell.step != item.step or cell.is_accepted is not None:
            return False
        cell.is_accepted, cell.highest = not item.is_missed, item.highest
        cell.read_from = item.read_from
        return cell.is_accepted

    def is_confirmed(self, kind: TargetKind) -> bool:
        """Return whether all hosts have accepted the target of `kind`."""
        cell = self._cells.get(kind)
        return cell is not None and cell.is_confirmed

    def check_ranks(self, ranks: Collection[int], begun: Mapping[int, int], lowest: int) -> None:
        """Mark the targets that every rank here has reached: it began its part, or is beyond."""
        for cell in self._cells.values():
            # Steps that were read before the cell was written do not show which ranks will read
            # the target.
            if not cell.is_served and cell.is_accepted is not None:
                cell.is_served = lowest > cell.read_from or all(
                    begun.get(rank, NO_STEP) >= cell.read_from for rank in ranks
                )

    def states(self) -> tuple[TargetState, ...]:
        """Return the states for a report, one for each target."""
        return tuple(
            TargetState(
                kind, cell.step, cell.is_accepted, cell.highest, cell.is_served, cell.is_confirmed
            )
            for kind, cell in sorted(self._cells.items())
        )
