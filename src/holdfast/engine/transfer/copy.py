"""Copy of a sealed part from one store to another, with every digest checked on the way.

The bytes are the same in every tier. If a block turns out damaged after some of the image was
passed to the target, the target's object never becomes visible, since objects are visible whole or
not at all.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice

from holdfast.engine.saving.part import check_digest
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.errors import StorageError
from holdfast.format.buffers import Buffer
from holdfast.format.digests import digest
from holdfast.format.names import CHECKPOINTS, image_key, part_key
from holdfast.format.part_layout import PartLayout, expected_digests, image_keys
from holdfast.format.records import PartRecord, ReusedImage
from holdfast.store.contract import ReadableStore, Reader, Store

log = logging.getLogger(__name__)


def copy_part(source: ReadableStore, target: Store, part: PartRecord, layouts: PartLayouts) -> None:
    """Copy a sealed part to another store, its images first.

    A reused image that the target has already is linked there, not copied.

    Raises:
        CheckpointDamagedError: a block of the source is damaged; the target has no part.
        OutOfSpaceError, StorageError: the target has no part.
    """
    layouts.check_counts(part)
    layout = layouts.layout_of(part)
    there = ReusedElsewhere(target, part)
    # Reused images first, then the own image, then the record: the order of docs/format.md.
    for number, key in reversed([*enumerate(image_keys(part))]):
        if number == 0 or not there.link(number, layout):
            expected = expected_digests(part, layout, number)
            _copy_image(source, target, key, expected, layout.images[number].size_bytes)
    record_key = part_key(part.id, part.rank, part.part_count)
    target.put(record_key, source.get(record_key))


def _copy_image(
    source: ReadableStore,
    target: Store,
    key: str,
    expected: Iterable[tuple[int, int, str]],
    size_bytes: int,
) -> None:
    with source.open(key) as image:
        target.put(key, _CheckedImage(image, key, expected, size_bytes))


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


class ReusedElsewhere:
    """The reused images of a part that a store has already, under the name of any checkpoint.

    A (step, attempt) is written once, so an image's name identifies it. If its save was tried more
    than once, in more than one place, the tries may have reused different images. The header's
    digest distinguishes them.
    """

    def __init__(self, store: Store, part: PartRecord) -> None:
        self._store = store
        self._part = part
        self._listed: list[str] | None = None

    def link(self, number: int, layout: PartLayout) -> bool:
        """Link image `number` of the part; return False if the store does not have it."""
        key = image_keys(self._part)[number]
        header_size_bytes = len(layout.images[number].header)
        for found in self._places(self._part.reused[number - 1], key):
            try:
                if self._is_image(found, self._part.reused[number - 1], header_size_bytes):
                    self._store.link(found, key)
                    return True
            except StorageError as error:
                log.debug("%s is not linked: %s", key, error)
        return False

    def _places(self, image: ReusedImage, key: str) -> Iterator[str]:
        # The image's own key comes first: an earlier try to copy this part may have left it there.
        yield key
        yield image_key(image.origin, self._part.rank, self._part.part_count)
        if self._listed is None:
            self._listed = [stored.key for stored in self._store.list(CHECKPOINTS)]
        name = key.rpartition("/")[2]
        yield from (k for k in reversed(self._listed) if k.rpartition("/")[2] == name)

    def _is_image(self, key: str, image: ReusedImage, header_size_bytes: int) -> bool:
        with self._store.open(key) as reader:
            if reader.size_bytes != image.image_size_bytes:
                return False
            header = memoryview(bytearray(header_size_bytes))
            reader.read_into(0, header)
            return digest(header) == image.header_digest


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
        self._expected = [*without_holes(expected, size_bytes)]
        self.size_bytes = size_bytes
        self.is_lasting = image.view() is not None

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        # A mapping does not change while the image is open, so it is passed on directly.
        view = self._image.view()
        if view is not None:
            for first, last, right in self._overlapping(start_bytes, stop_bytes):
                if right and last <= stop_bytes:
                    check_digest(digest(view[first:last]), (first, last, right), self._key)
            yield view[start_bytes:stop_bytes]
            return
        for first, last, right in self._overlapping(start_bytes, stop_bytes):
            start, stop = max(first, start_bytes), min(last, stop_bytes)
            if not right:
                first, last = start, stop
            block = memoryview(bytearray(last - first))
            self._image.read_into(first, block)
            if right:
                check_digest(digest(block), (first, last, right), self._key)
            yield block[start - first : stop - first]

    def _overlapping(self, start_bytes: int, stop_bytes: int) -> Iterator[tuple[int, int, str]]:
        index = bisect_right(self._expected, start_bytes, key=_stop_bytes)
        for found in islice(self._expected, index, None):
            if found[0] >= stop_bytes:
                return
            yield found


def _stop_bytes(expected: tuple[int, int, str]) -> int:
    return expected[1]
