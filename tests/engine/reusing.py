"""Checkpoints that reuse images of earlier ones, as chosen by a test.

`Chain` writes one checkpoint after another of the same structure. The oracle is what each `Made`
holds: NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.saving.part import PartImages, PartPlan
from holdfast.engine.saving.part_writer import write_part
from holdfast.format.layout import partial_layout
from holdfast.format.names import CheckpointId, image_key, reused_image_key
from holdfast.format.records import PartRecord, ReusedImage, members, ranges_of
from holdfast.store.contract import Store
from holdfast.store.ram import RamStore
from tests.engine.making import Made, random_array


def images_reusing(plan: PartPlan, last: PartRecord, unchanged: Collection[int]) -> PartImages:
    """The images of a part that takes the chunks `unchanged`, by ordinal, from those of `last`."""
    elsewhere = {ordinal for image in last.reused for ordinal in members(image.used)}
    own = [c.ordinal for c in plan.layout.chunks if c.ordinal not in elsewhere]
    before = [*last.reused]
    if own:
        image = ReusedImage(
            origin=last.id,
            image_size_bytes=last.image_size_bytes,
            header_digest=last.header_digest,
            laid=ranges_of(own),
            used=ranges_of(own),
        )
        before.append(image)
    reused = []
    for image in before:
        used = ranges_of(o for o in members(image.used) if o in unchanged)
        if used:
            reused.append(
                ReusedImage(
                    origin=image.origin,
                    image_size_bytes=image.image_size_bytes,
                    header_digest=image.header_digest,
                    laid=image.laid,
                    used=used,
                )
            )
    taken = {ordinal for image in reused for ordinal in members(image.used)}
    rest = [c.ordinal for c in plan.layout.chunks if c.ordinal not in taken]
    blocks = {}
    for ordinal in taken:
        chunk = plan.layout.chunks[ordinal]
        count = -(-chunk.size_bytes // (8 * 1024 * 1024))
        blocks[ordinal] = last.blocks[chunk.first_block : chunk.first_block + count]
    layout = partial_layout(plan.spec.arrays, plan.layout, rest)
    return PartImages(own=layout, reused=tuple(reused), reused_blocks=blocks)


def link_images(store: Store, plan: PartPlan, last: PartRecord, images: PartImages) -> None:
    """Link the reused images from the folder of `last`, if `store` is in RAM."""
    for image in images.reused if isinstance(store, RamStore) else ():
        source = reused_image_key(last.id, plan.rank, plan.part_count, image.origin)
        if image.origin == last.id:
            source = image_key(last.id, plan.rank, plan.part_count)
        store.link(source, reused_image_key(plan.id, plan.rank, plan.part_count, image.origin))


@dataclass
class Chain:
    """One checkpoint after another; `made` are those written so far."""

    made: list[Made] = field(default_factory=list)
    records: list[list[PartRecord]] = field(default_factory=list)

    def begin(self, first: Made, store: Store) -> None:
        """Write a first checkpoint, which reuses nothing."""
        self.made.append(first)
        self.records.append(first.write(store))

    def go_on(self, store: Store, changed: Collection[tuple], step: int) -> Made:
        """Writes the next checkpoint, with new bytes in the arrays of these paths."""
        last = self.made[-1]
        made = Made(
            id=CheckpointId(step, last.id.attempt),
            part_count=last.part_count,
            arrays=dict(last.arrays),
            specs=last.specs,
            values=last.values,
        )
        for path in changed:
            array = made.arrays[path]
            made.arrays[path] = _other(array, step)
        parts = []
        for rank in range(made.part_count):
            plan, before = made.plan(rank), self.records[-1][rank]
            unchanged = {
                chunk.ordinal
                for chunk in plan.layout.chunks
                if made.specs[chunk.array_index].path not in changed
            }
            images = images_reusing(plan, before, unchanged)
            link_images(store, plan, before, images)
            parts.append(write_part(store, plan, made.chunk_bytes, images))
        self.made.append(made)
        self.records.append(parts)
        return made

    def commit(self, store: Store, made: Made) -> None:
        """Commits one of them."""
        commit(store, made.id, made.part_count)


def _other(array: np.ndarray, seed: int) -> np.ndarray:
    """Other bits of the same shape and dtype."""
    return random_array(array.shape, array.dtype, seed * 1000 + array.size)
