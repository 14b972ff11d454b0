"""Fetch of a part from a peer's RAM into this host's: directly into a slot, over several streams.

Where a rank of this host has already copied its own chunks of the image into the slot, blocks with
the right digest are kept and only the others are fetched.

Every digest is checked in the slot before the image gets its name. The part record is checked first
and written last. So a peer that dies midway or has a damaged block leaves no visible object, and
the slot is free again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.engine.saving.part import check_block
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import holds_image, without_holes
from holdfast.errors import CheckpointDamagedError, HoldfastError, StorageError
from holdfast.format.digests import digest
from holdfast.format.names import CHECKPOINTS, image_key, part_key
from holdfast.format.part_layout import PartLayout, expected_digests, image_keys
from holdfast.format.records import PartRecord, ReusedImage
from holdfast.format.sealed import unseal
from holdfast.store.contract import ReadableStore, Reader
from holdfast.store.ram import RamStore, SlotWriter

log = logging.getLogger(__name__)

STREAM_COUNT = 4
SPAN_SIZE_BYTES = 16 * 1024 * 1024

Digests = Sequence[tuple[int, int, str]]
"""(start, stop, digest) of adjacent ranges of an image."""


def fetch_part(
    source: ReadableStore,
    target: RamStore,
    part: PartRecord,
    layouts: PartLayouts,
    *,
    is_filled: bool = False,
) -> int:
    """Fetch a sealed part into `target`, its image first.

    With `is_filled`, the slot that `target` reserves already contains some of the image.

    Returns:
        The number of image bytes fetched from the source.

    Raises:
        CheckpointDamagedError: the source has another record, or a damaged block; the target has no
            part.
        OutOfSpaceError, StorageError: the target has no part.
    """
    layouts.check_counts(part)
    layout = layouts.layout_of(part)
    # Compared before any image is fetched: the source may have another save of this step.
    record_key = part_key(part.id, part.rank, part.part_count)
    record = source.get(record_key)
    if unseal(record, PartRecord, record_key) != part:
        raise CheckpointDamagedError(f"read {source.name}: {record_key}: it is another part's")
    try:
        pulled_bytes = _pull_images(source, target, part, layout, is_filled)
        target.put(record_key, record)
    except HoldfastError:
        # An image without a record would hold memory that is never released.
        for key in image_keys(part, is_in_memory=target.is_in_memory):
            with contextlib.suppress(StorageError):
                target.delete(key)
        raise
    return pulled_bytes


def _pull_images(
    source: ReadableStore, target: RamStore, part: PartRecord, layout: PartLayout, is_filled: bool
) -> int:
    there = _ReusedElsewhere(target, part)
    pulled_bytes = 0
    # Reused images first, then the own image, then the record: the order of docs/format.md.
    target_keys = image_keys(part, is_in_memory=target.is_in_memory)
    for number, key in reversed([*enumerate(target_keys)]):
        if number == 0 or not there.link(number, layout):
            size_bytes = layout.images[number].size_bytes
            expected = without_holes(expected_digests(part, layout, number), size_bytes)
            with source.open(key) as image, contextlib.closing(target.begin(size_bytes)) as filling:
                fetch = _Fetch(filling, image, f"{source.name}: {key}", is_filled and not number)
                fetch.run(_spans(expected))
                filling.show(key)
            pulled_bytes += fetch.pulled_bytes
    return pulled_bytes


class _ReusedElsewhere:
    """The reused images of a part that RAM has already, under the name of any checkpoint."""

    def __init__(self, store: RamStore, part: PartRecord) -> None:
        self._store = store
        self._part = part
        self._listed: list[str] | None = None

    def link(self, number: int, layout: PartLayout) -> bool:
        """Link image `number` of the part; return False if the store does not have it."""
        key = image_keys(self._part, is_in_memory=self._store.is_in_memory)[number]
        header_size_bytes = len(layout.images[number].header)
        image = self._part.reused[number - 1]
        for place in self._places(image, key):
            try:
                if holds_image(self._store, place, image, header_size_bytes):
                    self._store.link(place, key)
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


def _spans(expected: Iterator[tuple[int, int, str]]) -> Iterator[Digests]:
    """Yield adjacent ranges in groups of about `SPAN_SIZE_BYTES`: one request each."""
    span: list[tuple[int, int, str]] = []
    for entry in expected:
        span.append(entry)
        if entry[1] - span[0][0] >= SPAN_SIZE_BYTES:
            yield span
            span = []
    if span:
        yield span


class _Fetch:
    """The fetch of one image into a slot, over several streams."""

    def __init__(self, filling: SlotWriter, image: Reader, where: str, is_filled: bool) -> None:
        self._filling = filling
        self._image = image
        self._where = where
        self._is_filled = is_filled
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.pulled_bytes = 0

    def run(self, spans: Iterator[Digests]) -> None:
        """Fill the slot; all streams have ended when this returns or raises."""
        with ThreadPoolExecutor(STREAM_COUNT, "holdfast-pull") as pool:
            try:
                for job in [pool.submit(self._stream, spans) for _ in range(STREAM_COUNT)]:
                    job.result()
            finally:
                # After an error the other streams stop before their next request, and the pool
                # waits for them: no bytes are written to the slot once it is released.
                self._stopping.set()

    def _stream(self, spans: Iterator[Digests]) -> None:
        while not self._stopping.is_set():
            with self._lock:
                span = next(spans, None)
            if span is None:
                return
            for missing in self._missing(span) if self._is_filled else [span]:
                self._fetch_span(missing)

    def _missing(self, span: Digests) -> Iterator[Digests]:
        """Yield the groups of adjacent ranges of a span that are not in the slot yet."""
        missing: list[tuple[int, int, str]] = []
        for start, stop, expected in span:
            if self._is_there(start, stop, expected):
                if missing:
                    yield missing
                missing = []
            else:
                missing.append((start, stop, expected))
        if missing:
            yield missing

    def _is_there(self, start: int, stop: int, expected: str) -> bool:
        with self._filling.target(start, stop) as block:
            # Chunks that this part does not use have no digest; any bytes are accepted.
            return not expected or digest(block) == expected

    def _fetch_span(self, span: Digests) -> None:
        start, stop = span[0][0], span[-1][1]
        with self._filling.target(start, stop) as memory:
            self._image.read_into(start, memory)
            for first, last, expected in span:
                # Chunks that this part does not use have no digest in its record.
                if expected:
                    with memory[first - start : last - start] as block:
                        check_block(block, expected, self._where, first)
        with self._lock:
            self.pulled_bytes += stop - start
