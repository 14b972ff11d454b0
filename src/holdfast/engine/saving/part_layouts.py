"""The layouts of a checkpoint's parts, each computed on first use.

Of thousands of parts a reader needs few, and laying one out takes longer than reading its record.
All records are checked against the arrays as far as that needs no layout. The rest, the lengths of
the headers, is checked for each part that is laid out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.engine.saving.part import check_layout
from holdfast.errors import CheckpointDamagedError
from holdfast.format.check import check_reused_chunks
from holdfast.format.layout import DATA_ALIGNMENT_BYTES, ImageLayout, image_layout
from holdfast.format.ownership import Ownership
from holdfast.format.part_layout import PartLayout, part_layout
from holdfast.format.records import ArraySpec, PartRecord, ReusedImage


class PartLayouts:
    """The layouts of the parts of one checkpoint of `arrays`. Thread-safe."""

    def __init__(self, arrays: Sequence[ArraySpec], before: PartLayouts | None = None) -> None:
        """Take over the layouts of `before`, another checkpoint's, if its arrays are equal."""
        self._arrays: Sequence[ArraySpec] = arrays
        if before is None or before._arrays != arrays:
            self._lock = threading.Lock()
            self._whole: dict[int, PartLayout] = {}
            self.owned = Ownership(arrays)
        else:
            self._lock = before._lock
            self._whole, self.owned = before._whole, before.owned
        self._reused: dict[tuple[int, tuple[ReusedImage, ...]], PartLayout] = {}

    def layout_of(self, part: PartRecord) -> PartLayout:
        """Return the layout of a part that was checked.

        Raises:
            CheckpointDamagedError: the record's sizes do not match the arrays.
        """
        with self._lock:
            layout = self._of(part.rank, part.reused)
        check_layout(part, layout)
        return layout

    def whole(self, rank: int) -> ImageLayout:
        """Return the layout of all chunks of a rank, as if they were in one image."""
        with self._lock:
            return self._whole_of(rank).images[0]

    def _of(self, rank: int, reused: tuple[ReusedImage, ...]) -> PartLayout:
        whole = self._whole_of(rank)
        if not reused:
            return whole
        key = rank, reused
        if key not in self._reused:
            self._reused[key] = part_layout(self._arrays, rank, reused, whole.images[0])
        return self._reused[key]

    def _whole_of(self, rank: int) -> PartLayout:
        """Return the part layout of a rank whose chunks are all in its own image."""
        if rank not in self._whole:
            laid = image_layout(self._arrays, rank, self.owned)
            self._whole[rank] = part_layout(self._arrays, rank, (), laid)
        return self._whole[rank]

    def check_counts(self, part: PartRecord) -> None:
        """Check, before any layout, that a part has a block for each chunk with bytes.

        Raises:
            CheckpointDamagedError: it has too few blocks, or reuses chunks that it does not own.
        """
        least = self.owned.block_count_min(part.rank)
        if len(part.blocks) < least:
            raise CheckpointDamagedError(
                f"{_where(part)}: it has {len(part.blocks)} blocks, expected at least {least}"
            )
        check_reused_chunks(part, self.owned, f"part {part.rank} of {part.id}")

    def check_all(self, parts: Sequence[PartRecord]) -> None:
        """Check all parts of the checkpoint against the arrays, without laying them out.

        Raises:
            CheckpointDamagedError: the blocks or bytes of a part do not match the arrays.
        """
        for part in parts:
            self.check_counts(part)
        # `_check_sizes` visits every chunk; the check above bounds them by the records' size.
        for part in parts:
            self._check_sizes(part)

    def _check_sizes(self, part: PartRecord) -> None:
        sizes, rank = self.owned.sizes, part.rank
        blocks = sizes.block_counts.get(rank, 0)
        if len(part.blocks) != blocks:
            raise CheckpointDamagedError(
                f"{_where(part)}: its record says {len(part.blocks)} blocks, the arrays make "
                f"{blocks} blocks"
            )
        data_bytes = sizes.data_bytes.get(rank, 0)
        header_bytes = part.image_size_bytes - data_bytes
        # With reused images the own image has fewer chunks; which ones needs a layout.
        is_whole = header_bytes >= DATA_ALIGNMENT_BYTES and not header_bytes % DATA_ALIGNMENT_BYTES
        if not part.reused and not is_whole:
            raise CheckpointDamagedError(
                f"{_where(part)}: its record says {part.image_size_bytes} bytes, the arrays make "
                f"{data_bytes} bytes and a header of a multiple of {DATA_ALIGNMENT_BYTES}"
            )


def _where(part: PartRecord) -> str:
    return f"read part {part.rank} of {part.id}"
