"""Digests: XXH3, 128 bits, over blocks of at most 8 MiB (xxhash.com, `XXH3_128bits`, seed 0).

They detect corruption, not forgery. 128 bits rather than 64, so that equal digests can be taken as
equal bytes where a later checkpoint reuses an earlier one's image. See docs/decisions/0002.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""A range of bytes that is passed on without a copy."""

BLOCK_SIZE_BYTES = 8 * 1024 * 1024
DIGEST_HEX_LENGTH = 32
RELEASE_SIZE_BYTES = 128 * 1024


def digest(data: Buffer) -> str:
    """Return the digest of `data`: 32 lower-case hexadecimal digits, most significant first."""
    if len(data) < RELEASE_SIZE_BYTES:
        return xxhash.xxh3_128_hexdigest(data)
    # The incremental API releases the GIL, so other threads run meanwhile.
    running = RunningDigest()
    running.update(data)
    return running.hexdigest()


class RunningDigest:
    """The digest of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        """Add more bytes. Releases the GIL from `RELEASE_SIZE_BYTES` on."""
        self._state.update(data)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far, in the form of `digest`."""
        return self._state.hexdigest()


def block_count(size_bytes: int) -> int:
    """Return how many blocks a chunk of `size_bytes` has; a chunk without bytes has none."""
    return -(-size_bytes // BLOCK_SIZE_BYTES)


def block_ranges(size_bytes: int) -> Sequence[tuple[int, int]]:
    """Return the half-open byte ranges of a chunk's blocks; only the last may be shorter."""
    if 0 < size_bytes <= BLOCK_SIZE_BYTES:
        return ((0, size_bytes),)
    starts = range(0, size_bytes, BLOCK_SIZE_BYTES)
    return [(start, min(start + BLOCK_SIZE_BYTES, size_bytes)) for start in starts]
