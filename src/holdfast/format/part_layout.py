"""The location of each chunk of a part: in its own image, or in an image that it reuses.

A pure function of the arrays, the rank and the record's `reused`, which must have passed
`holdfast.format.check`. Images are numbered: 0 is the part's own, then those of `reused` in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.format.digests import block_ranges
from holdfast.format.layout import Chunk, ImageLayout, image_layout, partial_layout
from holdfast.format.names import image_key, reused_image_key
from holdfast.format.records import ArraySpec, PartRecord, ReusedImage, members


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """The layouts of a part's images, the own one first.

    `used[i]` are the chunks that are read from image i, by ascending offset. `places[ordinal]` is
    the number of the image that a chunk is read from, and the chunk with its offset there.
    """

    images: tuple[ImageLayout, ...]
    used: tuple[tuple[Chunk, ...], ...]
    places: tuple[tuple[int, Chunk], ...]
    block_count: int


def part_layout(
    arrays: Sequence[ArraySpec],
    rank: int,
    reused: Sequence[ReusedImage],
    whole: ImageLayout | None = None,
) -> PartLayout:
    """Return the layout of the part that `rank` contributes to a checkpoint of `arrays`.

    `whole` is the layout of all of the rank's chunks, if the caller has it.
    """
    whole = whole or image_layout(arrays, rank)
    if not reused:
        return PartLayout(
            images=(whole,),
            used=(whole.chunks,),
            places=tuple((0, chunk) for chunk in whole.chunks),
            block_count=whole.block_count,
        )
    elsewhere = {ordinal for image in reused for ordinal in members(image.used)}
    own = (chunk.ordinal for chunk in whole.chunks if chunk.ordinal not in elsewhere)
    images = [partial_layout(arrays, whole, own)]
    used = [images[0].chunks]
    for image in reused:
        images.append(partial_layout(arrays, whole, members(image.laid)))
        used_ordinals = set(members(image.used))
        used.append(tuple(chunk for chunk in images[-1].chunks if chunk.ordinal in used_ordinals))
    by_ordinal = {chunk.ordinal: (i, chunk) for i, chunks in enumerate(used) for chunk in chunks}
    return PartLayout(
        images=tuple(images),
        used=tuple(used),
        places=tuple(by_ordinal[ordinal] for ordinal in range(len(whole.chunks))),
        block_count=whole.block_count,
    )


def image_keys(part: PartRecord, *, is_in_memory: bool) -> tuple[str, ...]:
    """Return the keys of a part's images in a store, the own one first.

    In durable tiers a reused image is in the folder of the checkpoint that wrote it. In RAM it
    has one more name, in the folder of each checkpoint that reuses it.
    """
    rank, count = part.rank, part.part_count
    own = image_key(part.id, rank, count)
    if is_in_memory:
        return own, *(reused_image_key(part.id, rank, count, image.origin) for image in part.reused)
    return own, *(image_key(image.origin, rank, count) for image in part.reused)


def origins_of(part: PartRecord) -> tuple[tuple[int, int], ...]:
    """Return the reused images of a part as the manifest lists them."""
    return tuple((image.origin.step, image.image_size_bytes) for image in part.reused)


def image_sizes_bytes(part: PartRecord) -> tuple[int, ...]:
    """Return the sizes of a part's images, the own one first."""
    return part.image_size_bytes, *(image.image_size_bytes for image in part.reused)


def header_digests(part: PartRecord) -> tuple[str, ...]:
    """Return the digests of the headers of a part's images, the own one first."""
    return part.header_digest, *(image.header_digest for image in part.reused)


def expected_digests(
    part: PartRecord, layout: PartLayout, image: int
) -> list[tuple[int, int, str]]:
    """Return (start, stop, digest) of each range of an image that has a digest, ascending."""
    ranges = [(0, len(layout.images[image].header), header_digests(part)[image])]
    for chunk in layout.used[image]:
        for number, (start, stop) in enumerate(block_ranges(chunk.size_bytes)):
            digest = part.blocks[chunk.first_block + number]
            ranges.append((chunk.offset_bytes + start, chunk.offset_bytes + stop, digest))
    return ranges
