"""From a snapshot's outline to what each rank writes; made once for each structure of the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from holdfast.adapt.contract import Outline, Snapshot
from holdfast.engine.plan import assign_owners, shared
from holdfast.engine.save import PartPlan
from holdfast.engine.splitting import split_large
from holdfast.format.layout import ImageLayout, image_layout
from holdfast.format.names import CheckpointId
from holdfast.format.records import ArraySpec, CheckpointSpec, encode_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """One checkpoint that is about to be taken."""

    id: CheckpointId
    time: datetime
    metrics: Mapping[str, float] | None


class Planner:
    """Plans for one rank; remembers the plan of the last outline."""

    def __init__(self, run_id: str, rank: int, count: int) -> None:
        self._run_id = run_id
        self._rank = rank
        self._count = count
        self._outline: Outline | None = None
        self._arrays: tuple[ArraySpec, ...] = ()
        self._layout: ImageLayout | None = None

    @property
    def image_size_bytes(self) -> int:
        """The size of this rank's last image; 0 before the first."""
        return self._layout.size_bytes if self._layout is not None else 0

    def layout(self, outline: Outline) -> ImageLayout:
        """The layout of this rank's image of such a state."""
        if outline is not self._outline or self._layout is None:
            self._arrays = array_specs(outline)
            self._layout = image_layout(self._arrays, self._rank)
            self._outline = outline
        return self._layout

    def plan(self, snapshot: Snapshot, taking: Taking) -> PartPlan:
        """What this rank writes of the checkpoint."""
        outline = snapshot.outline
        layout = self.layout(outline)
        metrics = dict(taking.metrics) if taking.metrics is not None else None
        spec = CheckpointSpec(
            time=taking.time,
            metrics=encode_metrics(metrics),
            arrays=self._arrays,
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


def array_specs(outline: Outline) -> tuple[ArraySpec, ...]:
    """The specs of an outline's arrays, with the chunks and owners that every rank plans alike."""
    placements = split_large([array.placement for array in outline.arrays])
    owners = shared(assign_owners(placements))
    return tuple(
        ArraySpec(
            path=array.path,
            shape=placement.shape,
            dtype=placement.dtype,
            chunk_shape=placement.chunk_shape,
            owners=of_array,
            prng_impl=array.prng_impl,
            scalar=array.scalar,
        )
        for array, placement, of_array in zip(outline.arrays, placements, owners, strict=True)
    )
