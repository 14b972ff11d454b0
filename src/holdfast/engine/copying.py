"""Copying a sealed part from one store to another, every byte checked on its way.

The bytes are the same in every tier, so nothing is laid out anew: the image is read from its start
in pieces of one size, each at an aligned place, while the piece before it is being written. A block
may reach over pieces; its digest is taken as they pass. What turns out bad after some of it was
handed to the target shows nowhere, since an object shows whole or not at all.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from holdfast.engine.save import check_digest, check_layout
from holdfast.format.buffers import Buffer
from holdfast.format.digests import RunningDigest, block_ranges
from holdfast.format.layout import ImageLayout, image_layout
from holdfast.format.names import image_key, part_key
from holdfast.format.records import CheckpointSpec, PartRecord
from holdfast.store.contract import Reader, Store

PIECE_SIZE_BYTES = 8 * 1024 * 1024


def copy_part(source: Store, target: Store, part: PartRecord, spec: CheckpointSpec) -> None:
    """Copies a sealed part to another store, its image first.

    Raises:
        CheckpointDamagedError: a block of the source is not what was sealed; the target has no
        part. OutOfSpaceError, StorageError: likewise no part.
    """
    layout = image_layout(spec.arrays, part.rank)
    check_layout(part, layout)
    key = image_key(part.id, part.rank, part.part_count)
    with source.open(key) as image, ThreadPoolExecutor(1, "holdfast-copy") as pool:
        pieces = _CheckedPieces(image, key, expected_digests(part, layout))
        target.put(key, part.image_size_bytes, pieces.read_ahead(pool, part.image_size_bytes))
    record_key = part_key(part.id, part.rank, part.part_count)
    data = source.get(record_key)
    target.put(record_key, len(data), [data])


def expected_digests(part: PartRecord, layout: ImageLayout) -> Iterator[tuple[int, int, str]]:
    """(start, stop, digest) of each range of an image that has one, in order and without holes."""
    yield 0, len(layout.header), part.header_digest
    for chunk in layout.chunks:
        for number, (start, stop) in enumerate(block_ranges(chunk.size_bytes)):
            offset = chunk.offset_bytes
            yield offset + start, offset + stop, part.blocks[chunk.first_block + number]


class _CheckedPieces:
    """Reads pieces of an image one after another; checks each digest when its last byte came by."""

    def __init__(self, image: Reader, key: str, expected: Iterator[tuple[int, int, str]]) -> None:
        self._image = image
        self._key = key
        self._expected = expected
        self._range = next(expected)
        self._digest = RunningDigest()

    def read_ahead(self, pool: ThreadPoolExecutor, size_bytes: int) -> Iterator[Buffer]:
        """The pieces in order; each is good until the next but one is asked for."""
        starts = range(0, size_bytes, PIECE_SIZE_BYTES)
        pages: list[memoryview] = []
        ahead = None
        for number, start in enumerate(starts):
            upto = min(start + PIECE_SIZE_BYTES, size_bytes)
            reading = pool.submit(self._read, start, upto, pages, number)
            if ahead is not None:
                yield ahead
            ahead = reading.result()
        if ahead is not None:
            yield ahead

    def _read(self, start: int, upto: int, pages: list[memoryview], number: int) -> memoryview:
        view = self._image.view()
        if view is not None:
            # It is written from where it stands. Nobody changes it: the image is open.
            piece = view[start:upto]
        else:
            if not pages:
                # Pages of their own are aligned, so a store can write them past the page cache.
                pages += [memoryview(mmap.mmap(-1, PIECE_SIZE_BYTES)) for _ in range(2)]
            piece = pages[number % 2][: upto - start]
            self._image.read_into(start, piece)
        self._check(start, piece)
        return piece

    def _check(self, start: int, piece: memoryview) -> None:
        done, stop = start, start + len(piece)
        while done < stop:
            upto = min(stop, self._range[1])
            self._digest.update(piece[done - start : upto - start])
            done = upto
            if done == self._range[1]:
                check_digest(self._digest.hexdigest(), self._range, self._key)
                self._range = next(self._expected, (stop, stop, ""))
                self._digest = RunningDigest()
