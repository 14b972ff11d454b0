"""Keep the state of the last step by reference, and tell whether it is still as it was then.

Nothing is copied: the tensors are the training's own. PyTorch counts the in-place changes of each
tensor's memory (`_version`). What it does not count is not seen: replayed CUDA graphs, kernels
that are given an address, `.data`, and NumPy arrays that share a tensor's memory.

See docs/decisions/0065 and docs/decisions/0069.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from holdfast.adapt.contract import ArrayOutline, Outline, Snapshot
from holdfast.adapt.torch.computed import Computed
from holdfast.format.paths import path_name


class HeldState:
    """The state of one step, by reference.

    Args:
        snapshot: The state, of which everything is borrowed.
        pieces: What this process holds of each array.
        divided: Whether each array is divided over ranks; the others are the same on all.
        computed: The computation of the state.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        pieces: Sequence[Any],
        divided: Sequence[bool],
        computed: Computed,
    ) -> None:
        self._snapshot = snapshot
        self._pieces = pieces
        self._divided = divided
        self._computed = computed
        self._versions = [getattr(piece, "_version", 0) for piece in pieces]

    def change(self) -> str:
        """Return what forbids to use it as the state of its step; empty: it is unchanged."""
        arrays = self._snapshot.outline.arrays
        if self._computed.is_torn:
            return "a device had not computed it when the collectives were aborted"
        names = [path_name(array.path) for array in arrays]
        for name, piece, version in zip(names, self._pieces, self._versions, strict=True):
            if isinstance(piece, np.ndarray):
                return f"{name} is a NumPy array, whose changes are not counted"
            if piece.is_inference():
                return f"{name} was made in inference mode, where changes are not counted"
            if piece._version != version:
                return f"{name} has changed since"
        return ""

    def snapshot(self) -> Snapshot:
        """Return the state as it was; the values are those of the step."""
        return self._snapshot

    def lost_with_a_rank(self) -> str:
        """Return what no other rank can save for a lost one; empty: there is nothing."""
        if not self._snapshot.outline.process_values:
            return ""
        name = path_name(self._snapshot.outline.process_values[0])
        return f"{name} has a state of its own on each rank, that of the lost rank among them"

    def of_survivors(self, survivors: Sequence[int]) -> Snapshot | None:
        """Return the state as one of a job of some of its ranks.

        Args:
            survivors: The ranks that are left, by the ranks that they have in the smaller job.

        Returns:
            The state; None if a part of it was held by lost ranks alone.
        """
        ranks = {rank: index for index, rank in enumerate(survivors)}
        outline = self._snapshot.outline
        arrays = [
            _array_of(array, ranks) if divided else array
            for array, divided in zip(outline.arrays, self._divided, strict=True)
        ]
        if any(array is None for array in arrays):
            return None
        self._snapshot.outline = Outline(
            arrays=tuple(array for array in arrays if array is not None),
            containers=outline.containers,
            process_values=outline.process_values,
            aliases=outline.aliases,
        )
        return self._snapshot


def _array_of(array: ArrayOutline, ranks: dict[int, int]) -> ArrayOutline | None:
    """Return an array of a smaller job; None if none of its ranks holds some chunk."""
    placement = array.placement
    holders = tuple(
        tuple(sorted(ranks[rank] for rank in of_chunk if rank in ranks))
        for of_chunk in placement.holders
    )
    if not all(holders):
        return None
    return replace(array, placement=replace(placement, holders=holders))
