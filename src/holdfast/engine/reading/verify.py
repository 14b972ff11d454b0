"""Verification: read every block of a checkpoint in one store and report damaged ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from holdfast.engine.reading.sources import CheckpointSources, PartSource
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.digests import BLOCK_SIZE_BYTES, digest
from holdfast.format.part_layout import expected_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCheck:
    """The result for one range: bytes [start, stop) of `key`, and the problem, if any."""

    tier: str
    key: str
    start_bytes: int
    stop_bytes: int
    expected: str
    found: str | None
    problem: str | None
    is_newer: bool = False
    """Whether the problem is a format version that this Holdfast does not read: no damage."""


def verify(sources: CheckpointSources) -> Iterator[BlockCheck]:
    """Check every block of every copy; yield one result per block, intact or not.

    Of a reused image, only the used chunks have digests and are read.
    """
    for copies in sources.parts:
        for copy in copies:
            for image in range(len(copy.layout.images)):
                yield from _verify_image(copy, image)


def _verify_image(copy: PartSource, image: int) -> Iterator[BlockCheck]:
    layout, key = copy.layout.images[image], copy.image_keys[image]
    check = partial(BlockCheck, tier=copy.store.tier, key=key)
    scratch = memoryview(bytearray(max(BLOCK_SIZE_BYTES, len(layout.header))))
    try:
        with copy.store.open(key) as reader:
            if reader.size_bytes != layout.size_bytes:
                yield check(
                    start_bytes=min(reader.size_bytes, layout.size_bytes),
                    stop_bytes=max(reader.size_bytes, layout.size_bytes),
                    expected="",
                    found=None,
                    problem=f"expected {layout.size_bytes} bytes, found {reader.size_bytes}",
                )
            for start, stop, expected in expected_digests(copy.part, copy.layout, image):
                block = scratch[: stop - start]
                block_digest, problem = None, None
                try:
                    reader.read_into(start, block)
                    block_digest = digest(block)
                    problem = None if block_digest == expected else "wrong digest"
                except StorageError as error:
                    problem = str(error)
                yield check(
                    start_bytes=start,
                    stop_bytes=stop,
                    expected=expected,
                    found=block_digest,
                    problem=problem,
                )
    except HoldfastError as error:
        yield check(
            start_bytes=0,
            stop_bytes=layout.size_bytes,
            expected="",
            found=None,
            problem=str(error),
        )
