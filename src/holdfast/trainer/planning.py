"""Plan what each rank writes, once for each structure of the state.

Invariant: a plan depends only on the outline and the failure domains, so all ranks compute the same
owners and replicas without communicating.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from holdfast.adapt.contract import Outline, Snapshot
from holdfast.engine.planning.chunking import split_large
from holdfast.engine.planning.owners import assign_owners, shared
from holdfast.engine.planning.replica_blocks import (
    ReplicaWindow,
    ReplicaWindows,
    replica_blocks,
)
from holdfast.engine.planning.replicas import Replica, replicas_of
from holdfast.engine.saving.part import PartPlan
from holdfast.errors import InvalidArgumentError
from holdfast.format.check import CHUNK_COUNT_MAX
from holdfast.format.grid import Placement
from holdfast.format.layout import ImageLayout, image_layout
from holdfast.format.names import CheckpointId
from holdfast.format.paths import PathPrefixes
from holdfast.format.records import ArraySpec, CheckpointSpec, encode_metrics
from holdfast.host.wire.protocol import COPIES_MAX
from holdfast.trainer.options import ReplicaCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """The identity, time and metrics of a checkpoint that is about to be saved."""

    id: CheckpointId
    time: datetime
    metrics: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A part of another rank, as far as this rank holds the same chunks.

    Attributes:
        rank: The rank whose part it is.
        layout: The layout of that part's image, reduced to the chunks that this rank holds too.
    """

    rank: int
    layout: ImageLayout


@dataclass(frozen=True, slots=True)
class Replicas:
    """The failure domain of each rank, and in how many domains each part is stored."""

    domains: Sequence[Hashable] = ()
    copies: int = 1


NO_REPLICAS = Replicas()


class Planner:
    """Plan for one rank. The plan of the last outline is kept for reuse."""

    def __init__(
        self,
        run_id: str,
        rank: int,
        count: int,
        replicas: Replicas = NO_REPLICAS,
        compared: ReplicaCheck | None = None,
    ) -> None:
        self._run_id = run_id
        self._rank = rank
        self._count = count
        self._replicas = replicas
        self._compared = compared
        self._windows: ReplicaWindows | None = None
        self._compared_saves = 0
        self._outline: Outline | None = None
        self._arrays: tuple[ArraySpec, ...] = ()
        self._layout: ImageLayout | None = None
        self.copies: tuple[PartCopy, ...] = ()
        """The replicas that this rank makes of parts of the last outline's state."""

    @property
    def image_size_bytes(self) -> int:
        """The size of this rank's last image in bytes; 0 before the first."""
        return self._layout.size_bytes if self._layout is not None else 0

    def layout(self, outline: Outline) -> ImageLayout:
        """Return the layout of this rank's image of a state with this outline."""
        if outline is not self._outline or self._layout is None:
            self._arrays, placements, copies = specs_and_copies(outline, self._replicas)
            self._layout = image_layout(self._arrays, self._rank)
            mine = [copy.rank for copy in copies if copy.keeper == self._rank][:COPIES_MAX]
            self.copies = tuple(self._copy_of(rank, placements) for rank in mine)
            if self._compared is not None and self._count > 1:
                self._windows = self._windows_of(outline, placements, self._compared)
            self._outline = outline
        return self._layout

    def plan(self, snapshot: Snapshot, taking: Taking) -> PartPlan:
        """Return what this rank writes of the checkpoint."""
        outline = snapshot.outline
        layout = self.layout(outline)
        metrics = dict(taking.metrics) if taking.metrics is not None else None
        spec = CheckpointSpec(
            time=taking.time,
            metrics=encode_metrics(metrics),
            arrays=self._arrays,
            aliases=outline.aliases,
            containers=outline.containers,
            values=snapshot.values,
            process_values=outline.process_values,
        )
        return PartPlan(
            run_id=self._run_id,
            id=taking.id,
            rank=self._rank,
            part_count=self._count,
            layout=layout,
            spec=spec,
            process_values=snapshot.process_values,
        )

    def next_compared(self) -> ReplicaWindow | None:
        """Return the blocks of other ranks to compare at this save, in turn; None: nothing is."""
        if self._windows is None:
            return None
        self._compared_saves += 1
        return self._windows.window(self._compared_saves - 1)

    def _windows_of(
        self, outline: Outline, placements: Sequence[Placement], compared: ReplicaCheck
    ) -> ReplicaWindows:
        may_differ = PathPrefixes(tuple(compared.may_differ))
        blocks = replica_blocks(
            self._arrays,
            placements,
            [not may_differ.covers(array.path) for array in outline.arrays],
            [array.is_everywhere for array in outline.arrays],
            self._count,
        )
        return ReplicaWindows(blocks, compared.share, self._rank)

    def _copy_of(self, rank: int, placements: Sequence[Placement]) -> PartCopy:
        whole = image_layout(self._arrays, rank)
        held = tuple(
            chunk
            for chunk in whole.chunks
            if self._rank in placements[chunk.array_index].holders[chunk.chunk_index]
        )
        return PartCopy(rank, replace(whole, chunks=held))


def specs_and_copies(
    outline: Outline, replicas: Replicas
) -> tuple[tuple[ArraySpec, ...], Sequence[Placement], tuple[Replica, ...]]:
    """Return the specs and placements of an outline's arrays, and the replicas between ranks.

    Every rank computes the same result.

    Raises:
        InvalidArgumentError: the arrays have more chunks than a manifest may have.
    """
    chunk_total = sum(len(array.placement.holders) for array in outline.arrays)
    if chunk_total > CHUNK_COUNT_MAX:
        raise InvalidArgumentError(
            f"save: expected arrays in at most {CHUNK_COUNT_MAX} shards in all, found "
            f"{chunk_total} of {len(outline.arrays)} arrays; shard them over fewer ranks"
        )
    placements = split_large([array.placement for array in outline.arrays])
    owners = assign_owners(placements)
    copies = replicas_of(placements, owners, replicas.domains, replicas.copies)
    specs = tuple(
        ArraySpec(
            path=array.path,
            shape=placement.shape,
            dtype=placement.dtype,
            chunk_shape=placement.chunk_shape,
            owners=of_array,
            prng_impl=array.prng_impl,
            scalar=array.scalar,
            weak_type=array.weak_type,
        )
        for array, placement, of_array in zip(
            outline.arrays, placements, shared(owners), strict=True
        )
    )
    return specs, placements, copies
