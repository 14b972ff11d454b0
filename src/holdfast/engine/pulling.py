"""Pulling a part out of a peer's RAM into this host's: straight into a slot, over several streams.

Where a rank here has copied the image out of its own state, only the part record is pulled.

Every digest is checked in the slot before the image gets its name, and the part record, which was
checked first, comes last. So a peer that dies midway or has a bad block leaves nothing that shows,
and a slot that is free again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.engine.copying import KeptElsewhere, without_holes
from holdfast.engine.save import check_block, check_layout
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format.check import check_kept_chunks
from holdfast.format.names import copy_key, part_key
from holdfast.format.ownership import Ownership
from holdfast.format.part_layout import PartLayout, expected_digests, image_keys, part_layout
from holdfast.format.records import CheckpointSpec, PartRecord
from holdfast.format.sealed import unseal
from holdfast.store.contract import Reader, Store
from holdfast.store.ram import Filling, RamStore

STREAM_COUNT = 4
SPAN_SIZE_BYTES = 16 * 1024 * 1024

log = logging.getLogger(__name__)
Digests = Sequence[tuple[int, int, str]]
"""(start, stop, digest) of neighbouring ranges of an image."""


def pull_part(source: Store, target: RamStore, part: PartRecord, spec: CheckpointSpec) -> int:
    """Brings a sealed part into `target`, its image first.

    Returns:
        How many bytes of images came from the source.

    Raises:
        CheckpointDamagedError: the source has another record, or a block that is not what was
            sealed; the target has no part.
        OutOfSpaceError, StorageError: likewise no part.
    """
    check_kept_chunks(part, Ownership(spec.arrays), f"part {part.rank} of {part.id}")
    layout = part_layout(spec.arrays, part.rank, part.kept)
    check_layout(part, layout)
    record_key = part_key(part.id, part.rank, part.part_count)
    record = source.get(record_key)
    if unseal(record, PartRecord, record_key) != part:
        raise CheckpointDamagedError(f"read {source.name}: {record_key}: it is another part's")
    try:
        pulled_bytes = _pull_images(source, target, part, layout)
        target.put(record_key, len(record), [record])
    except HoldfastError:
        # A name without a record would hold memory that nobody gives back.
        for key in image_keys(part):
            with contextlib.suppress(StorageError):
                target.delete(key)
        raise
    return pulled_bytes


def _pull_images(source: Store, target: RamStore, part: PartRecord, layout: PartLayout) -> int:
    there = KeptElsewhere(target, part)
    pulled_bytes = 0
    for number, key in reversed([*enumerate(image_keys(part))]):
        if _take_copy(target, part, layout) if number == 0 else there.link(number, layout):
            continue
        size_bytes = layout.images[number].size_bytes
        expected = without_holes(expected_digests(part, layout, number), size_bytes)
        _pull_image(source, target, key, size_bytes, list(_spans(expected)))
        pulled_bytes += size_bytes
    return pulled_bytes


def _take_copy(target: RamStore, part: PartRecord, layout: PartLayout) -> bool:
    """Makes the copy that a rank here put there the part's image, if it is that, byte for byte."""
    made = copy_key(part.id, part.rank, part.part_count)
    try:
        with target.open(made) as image:
            _check_copy(image, part, layout, made)
        target.link(made, image_keys(part)[0])
    except ObjectNotFoundError:
        return False
    except (CheckpointDamagedError, StorageError) as error:
        # The ranks were not at one state, or kept something else of the checkpoint before.
        log.info("%s is pulled, the copy made here is none of it: %s", part.id, error)
        return False
    finally:
        with contextlib.suppress(StorageError):
            target.delete(made)
    return True


def _check_copy(image: Reader, part: PartRecord, layout: PartLayout, where: str) -> None:
    size_bytes = layout.images[0].size_bytes
    if image.size_bytes != size_bytes:
        raise CheckpointDamagedError(
            f"read {where}: expected {size_bytes} bytes, found {image.size_bytes}"
        )
    memory = image.view()
    assert memory is not None, "what is in RAM can be looked at"
    for start, stop, expected in expected_digests(part, layout, 0):
        with memory[start:stop] as block:
            check_block(block, expected, where, start)


def _pull_image(
    source: Store, target: RamStore, key: str, size_bytes: int, spans: Sequence[Digests]
) -> None:
    with source.open(key) as image, contextlib.closing(target.begin(size_bytes)) as filling:
        _fill(filling, image, spans, f"{source.name}: {key}")
        filling.show(key)


def _spans(expected: Iterator[tuple[int, int, str]]) -> Iterator[Digests]:
    """Neighbouring ranges in lots of about `SPAN_SIZE_BYTES`: each is one request."""
    span: list[tuple[int, int, str]] = []
    for one in expected:
        span.append(one)
        if one[1] - span[0][0] >= SPAN_SIZE_BYTES:
            yield span
            span = []
    if span:
        yield span


def _fill(filling: Filling, image: Reader, spans: Sequence[Digests], where: str) -> None:
    """Fills the slot; the streams have ended when this returns or raises."""
    left = iter(spans)
    lock, stopping = threading.Lock(), threading.Event()

    def stream() -> None:
        while not stopping.is_set():
            with lock:
                span = next(left, None)
            if span is None:
                return
            _bring(filling, image, span, where)

    with ThreadPoolExecutor(STREAM_COUNT, "holdfast-pull") as pool:
        try:
            for job in [pool.submit(stream) for _ in range(STREAM_COUNT)]:
                job.result()
        finally:
            stopping.set()


def _bring(filling: Filling, image: Reader, span: Digests, where: str) -> None:
    start, stop = span[0][0], span[-1][1]
    with filling.target(start, stop) as memory:
        image.read_into(start, memory)
        for first, last, expected in span:
            # What this part does not use has no digest in its record.
            if expected:
                with memory[first - start : last - start] as block:
                    check_block(block, expected, where, first)
