"""A member's three target words: what they say, and what came of it.

Invariant: a target is accepted only if no rank here had published its step once the word stood. A
rank publishes its step and then reads the word; the agent writes the word and then reads the steps.
So a rank that was not seen at or beyond the target will see the target.
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
    is_served: bool = False
    is_confirmed: bool = False


class TargetCells:
    """What the words of one host say."""

    def __init__(self) -> None:
        self._cells: dict[TargetKind, _Cell] = {}

    def adopt_cells(self, turn: Turn, found: Found) -> None:
        """Takes the words as an agent before this one left them, and looks at them anew."""
        for kind, step in found.targets.items():
            is_confirmed = kind is TargetKind.PREEMPTION and found.is_confirmed
            self._cells[kind] = _Cell(step, is_confirmed=is_confirmed)
            turn.act(SetTarget(kind, step))

    def reset(self, turn: Turn) -> None:
        """Clears them all, for a new attempt: an agent before this one may have left some."""
        self._cells.clear()
        for kind in TargetKind:
            turn.act(ClearTarget(kind))

    @property
    def is_waiting(self) -> bool:
        """Whether ranks have still to come to a target."""
        return any(not cell.is_served for cell in self._cells.values())

    def apply_targets(self, turn: Turn, targets: Sequence[TargetProposal]) -> None:
        """Makes the words say what the leader wants."""
        wanted = {target.kind: target for target in targets}
        for kind in TargetKind:
            target, cell = wanted.get(kind), self._cells.get(kind)
            if target is None:
                if cell is not None:
                    del self._cells[kind]
                    turn.act(ClearTarget(kind))
                continue
            if cell is None or cell.step != target.step:
                cell = self._cells[kind] = _Cell(target.step)
                turn.act(SetTarget(kind, target.step))
            if target.is_confirmed and not cell.is_confirmed:
                cell.is_confirmed = True
                if kind is TargetKind.PREEMPTION:
                    turn.act(ConfirmTarget(target.step))

    def written(self, item: TargetWritten) -> bool:
        """Takes the look after the writing; whether the target is accepted by it."""
        cell = self._cells.get(item.kind)
        if cell is None or cell.step != item.step or cell.is_accepted is not None:
            return False
        cell.is_accepted, cell.highest = item.highest < item.step, item.highest
        return cell.is_accepted

    def is_confirmed(self, kind: TargetKind) -> bool:
        """Whether all hosts have accepted the target of `kind`."""
        cell = self._cells.get(kind)
        return cell is not None and cell.is_confirmed

    def check_ranks(self, ranks: Collection[int], begun: Mapping[int, int], lowest: int) -> None:
        """Notes which targets every rank here has come to: it began its part, or is beyond."""
        for cell in self._cells.values():
            # Steps that were read before the word stood tell nothing of who will see it.
            if not cell.is_served and cell.is_accepted is not None:
                cell.is_served = lowest > cell.step or all(
                    begun.get(rank, NO_STEP) >= cell.step for rank in ranks
                )

    def states(self) -> tuple[TargetState, ...]:
        """What the leader is told."""
        return tuple(
            TargetState(
                kind, cell.step, cell.is_accepted, cell.highest, cell.is_served, cell.is_confirmed
            )
            for kind, cell in sorted(self._cells.items())
        )
