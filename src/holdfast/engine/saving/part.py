"""One rank's part of a checkpoint: the description of its images, and checks of what was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import CheckpointDamagedError
from holdfast.format.digests import Buffer, digest
from holdfast.format.layout import Chunk, ImageLayout
from holdfast.format.names import CheckpointId
from holdfast.format.part_layout import PartLayout, image_sizes_bytes
from holdfast.format.records import CheckpointSpec, PartRecord, ReusedImage, SavedValue

ChunkBytes = Callable[[Chunk], memoryview]
"""The bytes of one chunk, contiguous, in C order, little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """The description of a part, without its bytes. `layout` is that of all of its chunks."""

    run_id: str
    id: CheckpointId
    rank: int
    part_count: int
    layout: ImageLayout
    spec: CheckpointSpec
    process_values: tuple[SavedValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartImages:
    """The images that a part will consist of: its own, and reused ones of earlier checkpoints.

    `reused_blocks` are the digests of each chunk in a reused image, by the chunk's ordinal.
    """

    own: ImageLayout
    reused: tuple[ReusedImage, ...] = ()
    reused_blocks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def check_layout(part: PartRecord, layout: PartLayout) -> None:
    """Check that a part's sizes and number of digests match its layout.

    Raises:
        CheckpointDamagedError: they do not.
    """
    recorded = (*image_sizes_bytes(part), len(part.blocks))
    expected = (*(image.size_bytes for image in layout.images), layout.block_count)
    if recorded != expected:
        raise CheckpointDamagedError(
            f"read part {part.rank} of {part.id}: its record says {_sizes_text(recorded)}, the "
            f"arrays make {_sizes_text(expected)}"
        )


def _sizes_text(sizes: Sequence[int]) -> str:
    *images, blocks = sizes
    return f"{' and '.join(map(str, images))} bytes and {blocks} blocks"


def check_block(data: Buffer, expected: str, where: str, offset_bytes: int) -> None:
    """Check one block against its digest.

    Raises:
        CheckpointDamagedError: names the file, the byte range, and both digests.
    """
    stop_bytes = offset_bytes + len(data)
    check_digest(digest(data), (offset_bytes, stop_bytes, expected), where)


def check_digest(actual: str, expected: tuple[int, int, str], where: str) -> None:
    """Check the digest of a range; `expected` is (start, stop, digest).

    Raises:
        CheckpointDamagedError: as `check_block`.
    """
    start, stop, right = expected
    if actual != right:
        raise CheckpointDamagedError(
            f"read {where}: bytes [{start}, {stop}) have digest {actual}, expected {right}; the "
            "bytes were changed after they were written"
        )
