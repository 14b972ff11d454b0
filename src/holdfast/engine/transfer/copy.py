"""Copy of a sealed part from one store to another, with every digest checked on the way.

The bytes are the same in every tier, so the image is read from its start in aligned pieces of one
size, each while the previous piece is being written. A block may span pieces; its digest is
computed across them. If a block turns out damaged after some of it was passed to the target, the
target's object never becomes visible, since objects are visible whole or not at all.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from holdfast.engine.saving.part import check_digest
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.errors import StorageError
from holdfast.format.buffers import Buffer
from holdfast.format.digests import RunningDigest, digest
from holdfast.format.names import CHECKPOINTS, image_key, part_key
from holdfast.format.part_layout import PartLayout, expected_digests, image_keys
from holdfast.format.records import PartRecord, ReusedImage
from holdfast.store.contract import Reader, Store

PIECE_SIZE_BYTES = 8 * 1024 * 1024
SEEN_SIZE_BYTES = 32 * 1024 * 1024
"""The piece size when the source is mapped: no buffers are needed, so pieces can be larger."""
FIRST_SIZE_BYTES = 4 * 1024 * 1024
"""The first piece is smaller: its digests are checked before anything is written."""

log = logging.getLogger(__name__)


def copy_part(source: Store, target: Store, part: PartRecord, layouts: PartLayouts) -> None:
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
    data = source.get(record_key)
    target.put(record_key, len(data), [data])


def _copy_image(
    source: Store,
    target: Store,
    key: str,
    expected: Iterable[tuple[int, int, str]],
    size_bytes: int,
) -> None:
    with source.open(key) as image, ThreadPoolExecutor(1, "holdfast-copy") as pool:
        pieces = _CheckedPieces(image, key, without_holes(expected, size_bytes))
        target.put(key, size_bytes, pieces.read_ahead(pool, size_bytes))


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


class _CheckedPieces:
    """Reads an image in pieces; checks each digest after its last byte was read."""

    def __init__(self, image: Reader, key: str, expected: Iterator[tuple[int, int, str]]) -> None:
        self._image = image
        self._key = key
        self._expected = expected
        self._range = next(expected)
        self._digest = RunningDigest()

    def read_ahead(self, pool: ThreadPoolExecutor, size_bytes: int) -> Iterator[Buffer]:
        """Yield the pieces in order; each is valid until the next but one is requested."""
        is_seen = self._image.view() is not None
        piece_bytes = SEEN_SIZE_BYTES if is_seen else PIECE_SIZE_BYTES
        pages: list[memoryview] = []
        ahead = None
        starts = (0, *range(FIRST_SIZE_BYTES, size_bytes, piece_bytes))
        for number, (start, upto) in enumerate(pairwise((*starts, size_bytes))):
            reading = pool.submit(self._read, start, upto, pages, number)
            if ahead is not None:
                yield ahead
            ahead = reading.result()
        if ahead is not None:
            yield ahead

    def _read(self, start: int, upto: int, pages: list[memoryview], number: int) -> memoryview:
        view = self._image.view()
        if view is not None:
            # Written directly from the mapping, which does not change while the image is open.
            piece = view[start:upto]
        else:
            if not pages:
                # Mapped pages are aligned, so a store can write them with O_DIRECT.
                pages += [memoryview(mmap.mmap(-1, PIECE_SIZE_BYTES)) for _ in range(2)]
            piece = pages[number % 2][: upto - start]
            self._image.read_into(start, piece)
        self._check(start, piece)
        return piece

    def _check(self, start: int, piece: memoryview) -> None:
        done, stop = start, start + len(piece)
        while done < stop:
            first, last, right = self._range
            upto = min(stop, last)
            data = piece[done - start : upto - start]
            is_whole = (done, upto) == (first, last)
            if not is_whole:
                self._digest.update(data)
            if upto == last:
                # Chunks that this part does not use have no digest in its record.
                if right:
                    found = digest(data) if is_whole else self._digest.hexdigest()
                    check_digest(found, self._range, self._key)
                if not is_whole:
                    self._digest = RunningDigest()
                self._range = next(self._expected, (stop, stop, ""))
            done = upto
