"""Pulling a part out of a peer's RAM into this host's: straight into a slot, over several streams.

Every digest is checked in the slot before the image gets its name, and the part record, which was
checked first, comes last. So a peer that dies midway or has a bad block leaves nothing that shows,
and a slot that is free again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.engine.copying import expected_digests
from holdfast.engine.save import check_block, check_layout
from holdfast.errors import CheckpointDamagedError
from holdfast.format.layout import image_layout
from holdfast.format.names import image_key, part_key
from holdfast.format.records import CheckpointSpec, PartRecord
from holdfast.format.sealed import unseal
from holdfast.store.contract import Reader, Store
from holdfast.store.ram import Filling, RamStore

STREAM_COUNT = 4
SPAN_SIZE_BYTES = 16 * 1024 * 1024

Digests = Sequence[tuple[int, int, str]]
"""(start, stop, digest) of neighbouring ranges of an image."""


def pull_part(source: Store, target: RamStore, part: PartRecord, spec: CheckpointSpec) -> None:
    """Brings a sealed part into `target`, its image first.

    Raises:
        CheckpointDamagedError: the source has another record, or a block that is not what was
            sealed; the target has no part.
        OutOfSpaceError, StorageError: likewise no part.
    """
    layout = image_layout(spec.arrays, part.rank)
    check_layout(part, layout)
    record_key = part_key(part.id, part.rank, part.part_count)
    record = source.get(record_key)
    if unseal(record, PartRecord, record_key) != part:
        raise CheckpointDamagedError(f"read {source.name}: {record_key}: it is another part's")
    key = image_key(part.id, part.rank, part.part_count)
    spans = list(_spans(expected_digests(part, layout)))
    with (
        source.open(key) as image,
        contextlib.closing(target.begin(part.image_size_bytes)) as filling,
    ):
        _fill(filling, image, spans, f"{source.name}: {key}")
        filling.show(key)
    target.put(record_key, len(record), [record])


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
            with memory[first - start : last - start] as block:
                check_block(block, expected, where, first)
