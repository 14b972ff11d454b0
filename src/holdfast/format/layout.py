"""The offset of every chunk of an image: a pure function of the arrays' specs and the chunk set.

The image is a safetensors file (github.com/huggingface/safetensors, "Format"). Chunks are sorted by
how many times 2 divides their byte count, 6 or more first, then by name (code points), without
holes: so each starts at a multiple of the power of two that divides its size, up to 64. The header
is padded with spaces so that the data starts at a multiple of 4096. The layout is not stored; it is
computed from the specs. Ranges are half-open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from holdfast.format.digests import block_count
from holdfast.format.dtypes import item_size_bytes, safetensors_form
from holdfast.format.grid import chunk_count, chunk_region, region_shape
from holdfast.format.ownership import Ownership
from holdfast.format.paths import chunk_name
from holdfast.format.records import ArraySpec

DATA_ALIGNMENT_BYTES = 4096
CHUNK_ALIGNMENT_BYTES = 64


_Unplaced = tuple[int, str, int, int, tuple[int, ...], tuple[int, ...], int]
"""The order of its alignment, its name, array, index, start, stop and bytes."""

_Entry = tuple[str, int, tuple[int, ...], tuple[int, ...], int]
"""Of a chunk in a header: its name, array, start, stop and bytes."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One chunk in one image. `offset_bytes` counts from the start of the file.

    A struct of msgspec: large states have 100,000 chunks, and a dataclass takes ten times as long.

    `ordinal` and `first_block` count over all chunks of the rank, in whichever image they are.
    """

    ordinal: int
    array_index: int
    chunk_index: int
    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    first_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """One rank's image: its header, and its chunks by ascending offset."""

    header: bytes
    chunks: tuple[Chunk, ...]
    size_bytes: int
    block_count: int


def image_layout(
    arrays: Sequence[ArraySpec], rank: int, owned: Ownership | None = None
) -> ImageLayout:
    """Return the layout of the image of all chunks that `rank` owns.

    `owned` is the ownership of `arrays`. Pass it when laying out several ranks, to compute it once.
    """
    owned = owned or Ownership(arrays)
    unplaced: list[_Unplaced] = []
    for array_index, spec in enumerate(arrays):
        item = item_size_bytes(spec.dtype)
        whole = spec.chunk_shape == spec.shape or chunk_count(spec.shape, spec.chunk_shape) == 1
        for chunk_index in chain.from_iterable(owned.runs(array_index, rank)):
            start, stop = chunk_region(spec.shape, spec.chunk_shape, chunk_index)
            name = spec.name if whole else chunk_name(spec.name, start, stop)
            size = item * math.prod(region_shape((start, stop)))
            # A size of 0 is divided by every power of two.
            alignment = min(size & -size or CHUNK_ALIGNMENT_BYTES, CHUNK_ALIGNMENT_BYTES)
            unplaced.append((-alignment, name, array_index, chunk_index, start, stop, size))
    # Names differ, so that the entries are never compared further.
    unplaced.sort()
    header, offset = _header(
        arrays, [(name, index, start, stop, n) for _, name, index, _, start, stop, n in unplaced]
    )
    chunks, block = [], 0
    for ordinal, (_, name, array_index, chunk_index, start, stop, size) in enumerate(unplaced):
        chunks.append(
            Chunk(
                ordinal=ordinal,
                array_index=array_index,
                chunk_index=chunk_index,
                name=name,
                start=start,
                stop=stop,
                offset_bytes=offset,
                size_bytes=size,
                first_block=block,
            )
        )
        offset += size
        block += block_count(size)
    return ImageLayout(header=header, chunks=tuple(chunks), size_bytes=offset, block_count=block)


def partial_layout(
    arrays: Sequence[ArraySpec], whole: ImageLayout, ordinals: Iterable[int]
) -> ImageLayout:
    """Return the layout of an image of some chunks of `whole`, given by ascending `ordinals`.

    `whole` is the result of `image_layout` for the same arrays.
    """
    ordered = [whole.chunks[ordinal] for ordinal in ordinals]
    header, offset = _header(
        arrays, [(c.name, c.array_index, c.start, c.stop, c.size_bytes) for c in ordered]
    )
    chunks, blocks = [], 0
    for chunk in ordered:
        chunks.append(msgspec.structs.replace(chunk, offset_bytes=offset))
        offset += chunk.size_bytes
        blocks += block_count(chunk.size_bytes)
    return ImageLayout(header=header, chunks=tuple(chunks), size_bytes=offset, block_count=blocks)


def _header(arrays: Sequence[ArraySpec], ordered: Sequence[_Entry]) -> tuple[bytes, int]:
    """Return the header of an image of chunks, and the offset of the first one."""
    entries: dict[str, object] = {"__metadata__": {"holdfast": "1"}}
    offset = 0
    for name, array_index, start, stop, size in ordered:
        extent = region_shape((start, stop))
        dtype, shape = safetensors_form(arrays[array_index].dtype, extent)
        span = offset, offset + size
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        offset += size
    text = msgspec.json.encode(entries)
    data_start = -(-(8 + len(text)) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    text = text.ljust(data_start - 8)
    return len(text).to_bytes(8, "little") + text, data_start
