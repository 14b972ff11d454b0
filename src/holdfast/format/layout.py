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
from holdfast.format.grid import chunk_count, chunk_region
from holdfast.format.ownership import Ownership
from holdfast.format.paths import chunk_name
from holdfast.format.records import ArraySpec

DATA_ALIGNMENT_BYTES = 4096
CHUNK_ALIGNMENT_BYTES = 64


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
    unplaced = []
    for array_index, spec in enumerate(arrays):
        item = item_size_bytes(spec.dtype)
        whole = chunk_count(spec.shape, spec.chunk_shape) == 1
        for chunk_index in chain.from_iterable(owned.runs(array_index, rank)):
            start, stop = chunk_region(spec.shape, spec.chunk_shape, chunk_index)
            name = spec.name if whole else chunk_name(spec.name, start, stop)
            size = item * math.prod(b - a for a, b in zip(start, stop, strict=True))
            # A size of 0 is divided by every power of two.
            alignment = min(size & -size or CHUNK_ALIGNMENT_BYTES, CHUNK_ALIGNMENT_BYTES)
            unplaced.append((-alignment, name, array_index, chunk_index, start, stop, size))
    unplaced.sort(key=lambda entry: entry[:2])
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
                offset_bytes=0,
                size_bytes=size,
                first_block=block,
            )
        )
        block += block_count(size)
    return _laid(arrays, chunks)


def partial_layout(
    arrays: Sequence[ArraySpec], whole: ImageLayout, ordinals: Iterable[int]
) -> ImageLayout:
    """Return the layout of an image of some chunks of `whole`, given by ascending `ordinals`.

    `whole` is the result of `image_layout` for the same arrays.
    """
    return _laid(arrays, [whole.chunks[ordinal] for ordinal in ordinals])


def _laid(arrays: Sequence[ArraySpec], ordered: Sequence[Chunk]) -> ImageLayout:
    header, offset = _header(arrays, ordered)
    chunks, blocks = [], 0
    for chunk in ordered:
        chunks.append(msgspec.structs.replace(chunk, offset_bytes=offset))
        offset += chunk.size_bytes
        blocks += block_count(chunk.size_bytes)
    return ImageLayout(header=header, chunks=tuple(chunks), size_bytes=offset, block_count=blocks)


def _header(arrays: Sequence[ArraySpec], ordered: Sequence[Chunk]) -> tuple[bytes, int]:
    entries: dict[str, object] = {"__metadata__": {"holdfast": "1"}}
    offset = 0
    for chunk in ordered:
        extent = tuple(b - a for a, b in zip(chunk.start, chunk.stop, strict=True))
        dtype, shape = safetensors_form(arrays[chunk.array_index].dtype, extent)
        stop = offset + chunk.size_bytes
        entries[chunk.name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, stop)}
        offset = stop
    text = msgspec.json.encode(entries)
    data_start = -(-(8 + len(text)) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    text = text.ljust(data_start - 8)
    return len(text).to_bytes(8, "little") + text, data_start
