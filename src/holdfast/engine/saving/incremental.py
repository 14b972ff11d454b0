"""Choose the images of the previous part that a new part reuses: only changes are written.

An image is reused whole. In RAM it gets one more name in the new checkpoint's folder; in the
durable tier the new part refers to it in the folder of its origin. A chunk is unchanged
if its array is the same object, of an immutable kind, or if its digests are equal again. Digests
are computed before anything is copied, and only of chunks whose digests were equal in the last two
saves, so that arrays that change in every step are not read for it. See docs/decisions/0007.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from holdfast.adapt.contract import Mark
from holdfast.engine.saving.part import ChunkBytes, PartImages, PartPlan
from holdfast.format.digests import block_count, block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout, partial_layout
from holdfast.format.records import PartRecord, ReusedImage, members, ranges_of

REUSED_COUNT_MAX = 4
USED_SIZE_MIN_BYTES = 1024 * 1024
USED_SHARE_MIN = 0.5
"""An image is reused only if at least this share of its bytes is used: the rest wastes space."""

TOGETHER_SIZE_MIN_BYTES = 64 * 1024 * 1024
THREADS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedPart:
    """A part that was sealed, in RAM or not, with the state needed to reuse its images.

    `marks` identify its arrays; `steady` are the ordinals of the chunks whose digests were equal in
    the previous save.
    """

    is_in_memory: bool
    record: PartRecord
    whole: ImageLayout
    own: ImageLayout
    marks: Sequence[Mark]
    steady: frozenset[int]


def remember(
    record: PartRecord,
    plan: PartPlan,
    images: PartImages,
    marks: Sequence[Mark],
    before: SealedPart | None,
    *,
    is_in_memory: bool,
    is_readable: bool,
) -> SealedPart:
    """Return the reuse state of a part that was just sealed; `before` is that of the last one.

    `is_in_memory`: it is in RAM. `is_readable`: the host can digest the bytes of such a state
    before they are copied.
    """
    steady: frozenset[int] = frozenset()
    if before is not None and before.whole is plan.layout:
        old_marks = before.marks
        steady = frozenset(
            chunk.ordinal
            for chunk in plan.layout.chunks
            if chunk.size_bytes
            and (is_readable or _is_same(old_marks[chunk.array_index], marks[chunk.array_index]))
            and _blocks(record, chunk) == _blocks(before.record, chunk)
        )
    return SealedPart(
        is_in_memory=is_in_memory,
        record=record,
        whole=plan.layout,
        own=images.own,
        marks=marks,
        steady=steady,
    )


def choose(
    plan: PartPlan,
    before: SealedPart | None,
    marks: Sequence[Mark],
    chunk_bytes: ChunkBytes | None,
) -> PartImages:
    """Return the images of a new part: those that it reuses of `before`, and its own.

    Without `chunk_bytes` nothing is digested: only chunks of identical objects are unchanged.
    """
    if before is None or not _may_serve(before, plan):
        return PartImages(own=plan.layout)
    old_marks = before.marks

    def is_same(chunk: Chunk) -> bool:
        return _is_same(old_marks[chunk.array_index], marks[chunk.array_index])

    return _images_of_part(plan, before, _still_good(before, is_same, chunk_bytes))


def size_of_next_bytes(last: SealedPart | None, plan: PartPlan) -> int:
    """Return the expected size in bytes of the own image after that of `plan`, in RAM.

    It is that of all chunks, unless `last` is that part: then the steady chunks stay unchanged.
    """
    if last is None or not last.is_in_memory or last.record.id != plan.id:
        return plan.layout.size_bytes
    images = _still_good(last, lambda chunk: chunk.ordinal in last.steady, None)
    return _images_of_part(plan, last, images).own.size_bytes


def _may_serve(before: SealedPart, plan: PartPlan) -> bool:
    # Ordinals are comparable only within one layout, and images are reused within one attempt.
    is_earlier = before.record.step < plan.id.step
    return before.whole is plan.layout and before.record.attempt == plan.id.attempt and is_earlier


def _images(before: SealedPart) -> Iterator[ReusedImage]:
    """Yield the images of a part as a later part refers to them, with their used chunks."""
    record = before.record
    ordinals = ranges_of(chunk.ordinal for chunk in before.own.chunks)
    yield from record.reused
    if ordinals:
        yield ReusedImage(
            origin=record.id,
            image_size_bytes=record.image_size_bytes,
            header_digest=record.header_digest,
            laid=ordinals,
            used=ordinals,
        )


def _still_good(
    before: SealedPart, is_same: Callable[[Chunk], bool], chunk_bytes: ChunkBytes | None
) -> list[tuple[int, ReusedImage]]:
    """Return the images worth reusing, each with the size of its unchanged chunks in bytes.

    With `chunk_bytes`, steady chunks whose object differs are digested whole, if that could make an
    image worth reusing.
    """
    usable = []
    for image in _images(before):
        chunks = [before.whole.chunks[ordinal] for ordinal in members(image.used)]
        unchanged = [chunk for chunk in chunks if is_same(chunk)]
        if chunk_bytes is not None and len(unchanged) < len(chunks):
            same = {chunk.ordinal for chunk in unchanged}
            steady = [c for c in chunks if c.ordinal in before.steady and c.ordinal not in same]
            if _is_worth(_size_bytes(unchanged) + _size_bytes(steady), image):
                unchanged += _equal(steady, chunk_bytes, before.record)
        size_bytes = _size_bytes(unchanged)
        if _is_worth(size_bytes, image):
            used = ranges_of(sorted(chunk.ordinal for chunk in unchanged))
            usable.append((size_bytes, msgspec.structs.replace(image, used=used)))
    return usable


def _equal(chunks: Sequence[Chunk], chunk_bytes: ChunkBytes, record: PartRecord) -> list[Chunk]:
    """Return the `chunks` with the digests of `record`. Uses all cores: a step may be waiting."""

    def is_equal(chunk: Chunk) -> bool:
        return _has_digests(chunk, chunk_bytes, _blocks(record, chunk))

    if _size_bytes(chunks) < TOGETHER_SIZE_MIN_BYTES:
        return [chunk for chunk in chunks if is_equal(chunk)]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, THREADS_MAX), "holdfast-digest") as pool:
        return [c for c, equal in zip(chunks, pool.map(is_equal, chunks), strict=True) if equal]


def _images_of_part(
    plan: PartPlan, before: SealedPart, usable: list[tuple[int, ReusedImage]]
) -> PartImages:
    best = sorted(usable, key=lambda entry: entry[0], reverse=True)[:REUSED_COUNT_MAX]
    if not best:
        return PartImages(own=plan.layout)
    reused = tuple(sorted((image for _, image in best), key=lambda image: image.origin))
    reused_blocks = {
        ordinal: _blocks(before.record, plan.layout.chunks[ordinal])
        for image in reused
        for ordinal in members(image.used)
    }
    rest = [c.ordinal for c in plan.layout.chunks if c.ordinal not in reused_blocks]
    own = before.own
    if rest != [chunk.ordinal for chunk in own.chunks]:
        own = partial_layout(plan.spec.arrays, plan.layout, rest)
    return PartImages(own=own, reused=reused, reused_blocks=reused_blocks)


def _is_worth(used_bytes: int, image: ReusedImage) -> bool:
    return used_bytes >= max(USED_SIZE_MIN_BYTES, USED_SHARE_MIN * image.image_size_bytes)


def _is_same(before: Mark, now: Mark) -> bool:
    if before is None or now is None:
        return False
    # Weak references are compared, not ids: a new object may have the id of a freed one.
    array = now()
    return array is not None and before() is array


def _has_digests(chunk: Chunk, chunk_bytes: ChunkBytes, expected: Sequence[str]) -> bool:
    data = chunk_bytes(chunk)
    ranges = zip(block_ranges(chunk.size_bytes), expected, strict=True)
    return all(digest(data[start:stop]) == right for (start, stop), right in ranges)


def _blocks(record: PartRecord, chunk: Chunk) -> tuple[str, ...]:
    return record.blocks[chunk.first_block : chunk.first_block + block_count(chunk.size_bytes)]


def _size_bytes(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.size_bytes for chunk in chunks)
