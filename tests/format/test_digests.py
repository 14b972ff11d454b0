"""Digests and blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format import digests

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # The first is XXH3 of no bytes, the others are in docs/format.md.
        (b"", "99aa06d3014798d86001c324468d497f"),
        (bytes.fromhex("c03f"), "f7f302f964658b4a12f7496a243a9638"),
        (bytes.fromhex("000000400000a040"), "3fd80764456fcf2165f956229dcb82b4"),
    ],
)
def test_a_digest_is_xxh3_of_128_bits_in_hexadecimal(data: bytes, expected: str) -> None:
    assert digests.digest(data) == expected


@given(st.integers(0, 40 * MIB))
def test_blocks_cover_a_chunk_in_order_and_only_the_last_is_short(size: int) -> None:
    ranges = list(digests.block_ranges(size))
    assert len(ranges) == digests.block_count(size)
    assert [a for a, _ in ranges] == [i * 8 * MIB for i in range(len(ranges))]
    assert [b for _, b in ranges] == [a for a, _ in ranges[1:]] + [size] * bool(ranges)
    assert all(0 < b - a <= 8 * MIB for a, b in ranges)
