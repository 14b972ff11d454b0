"""Copy of a sealed part from one store to another, with every digest checked on the way.

The bytes are the same in every tier. If a block turns out damaged after some of the image was
passed to the target, the target's object never becomes visible, since objects are visible whole or
not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice

from holdfast.engine.saving.part import check_digest
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.errors import ObjectNotFoundError, StorageError
from holdfast.format.digests import Buffer, digest
from holdfast.format.names import part_key
from holdfast.format.part_layout import PartLayout, expected_digests, image_keys
from holdfast.format.records import PartRecord, ReusedImage
from holdfast.store.contract import ReadableStore, Reader, Store


def copy_part(source: ReadableStore, target: Store, part: PartRecord, layouts: PartLayouts) -> None:
    """Copy a sealed part to the durable tier, its images first.

    A reused image that the target has already is not copied.

    Raises:
        CheckpointDamagedError: a block of the source is damaged; the target has no part.
        OutOfSpaceError, StorageError: the target has no part.
    """
    layouts.check_counts(part)
    layout = layouts.layout_of(part)
    source_keys = image_keys(part, is_in_memory=source.is_in_memory)
    keys = [*zip(source_keys, image_keys(part, is_in_memory=target.is_in_memory), strict=True)]
    # Reused images first, then the own image, then the record: the order of docs/format.md.
    for number, (source_key, key) in reversed([*enumerate(keys)]):
        if number == 0 or not is_stored(target, part, number, layout):
            expected = expected_digests(part, layout, number)
            size_bytes = layout.images[number].size_bytes
            with source.open(source_key) as image:
                target.put(key, _CheckedImage(image, source_key, expected, size_bytes))
    record_key = part_key(part.id, part.rank, part.part_count)
    target.put(record_key, source.get(record_key))


def is_stored(target: Store, part: PartRecord, number: int, layout: PartLayout) -> bool:
    """Return whether the target has image `number` of a part, which the part reuses.

    Raises:
        StorageError: it has another image there, which a part record describes.
    """
    image = part.reused[number - 1]
    key = image_keys(part, is_in_memory=target.is_in_memory)[number]
    try:
        if holds_image(target, key, image, len(layout.images[number].header)):
            return True
        target.get(part_key(image.origin, part.rank, part.part_count))
    except ObjectNotFoundError:
        return False
    raise StorageError(
        f"write part {part.rank} of {part.id}: it reuses {key}, expected the image with header "
        f"digest {image.header_digest}, found another one, which is not replaced; save again"
    )


def without_holes(
    ranges: Iterable[tuple[int, int, str]], size_bytes: int
) -> Iterator[tuple[int, int, str]]:
    """Yield `ranges`, and the gaps between and after them with an empty digest."""
    end = 0
    for start, stop, right in ranges:
        if end < start:
            yield end, start, ""
        yield start, stop, right
        end = stop
    if end < size_bytes:
        yield end, size_bytes, ""


def holds_image(store: ReadableStore, key: str, image: ReusedImage, header_size_bytes: int) -> bool:
    """Return whether the object of `key` is this image, by its size and the header's digest.

    A (step, attempt) is written once, so an image's name identifies it. If its save was tried more
    than once, in more than one place, the tries may have reused different images. The header's
    digest distinguishes them.

    Raises:
        ObjectNotFoundError: there is no object.
    """
    with store.open(key) as reader:
        if reader.size_bytes != image.image_size_bytes:
            return False
        header = memoryview(bytearray(header_size_bytes))
        reader.read_into(0, header)
        return digest(header) == image.header_digest


class BlockRanges:
    """The (start, stop, digest) of an image's blocks, with an empty digest for what has none."""

    def __init__(self, expected: Iterable[tuple[int, int, str]], size_bytes: int) -> None:
        self._ranges = [*without_holes(expected, size_bytes)]

    def overlapping(self, start_bytes: int, stop_bytes: int) -> Iterator[tuple[int, int, str]]:
        """Yield the ranges that overlap [start, stop), in order and not cut."""
        index = bisect_right(self._ranges, start_bytes, key=_stop_bytes)
        for span in islice(self._ranges, index, None):
            if span[0] >= stop_bytes:
                return
            yield span


class _CheckedImage:
    """The bytes of an open image; a block is checked before its last byte is passed on."""

    def __init__(
        self,
        image: Reader,
        key: str,
        expected: Iterable[tuple[int, int, str]],
        size_bytes: int,
    ) -> None:
        self._image = image
        self._key = key
        self._expected = BlockRanges(expected, size_bytes)
        self.size_bytes = size_bytes
        self.is_lasting = image.view() is not None

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        # A mapping does not change while the image is open, so it is passed on directly.
        view = self._image.view()
        if view is not None:
            for first, last, right in self._expected.overlapping(start_bytes, stop_bytes):
                if right and last <= stop_bytes:
                    check_digest(digest(view[first:last]), (first, last, right), self._key)
            yield view[start_bytes:stop_bytes]
            return
        for first, last, right in self._expected.overlapping(start_bytes, stop_bytes):
            start, stop = max(first, start_bytes), min(last, stop_bytes)
            if not right:
                first, last = start, stop
            block = memoryview(bytearray(last - first))
            self._image.read_into(first, block)
            if right:
                check_digest(digest(block), (first, last, right), self._key)
            yield block[start - first : stop - first]


def _stop_bytes(expected: tuple[int, int, str]) -> int:
    return expected[1]
