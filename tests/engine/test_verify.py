"""Verification reports exactly the damaged ranges of each copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.engine.reading.verify import BlockCheck, verify
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.format.names import image_key
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.engine.making import Made, flip_bit, random_array, sources_of

MIB = 1 << 20


@pytest.fixture
def made(memory: RamStore, durable: DiskStore) -> Made:
    """Rank 0: 17 MiB and 3 bytes in blocks of 8; rank 1: a chunk of 5 bytes and an empty one."""
    made = Made(part_count=2)
    made.add(("big",), random_array((17 * MIB,), "uint8", 1))
    made.add(("odd",), random_array((3,), "int8", 2))
    made.add(("five",), random_array((5,), "bool", 3), owners=((1, 1),))
    made.add(("none",), random_array((0,), "float32", 4), owners=((1, 1),))
    for part in made.write(memory):
        copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
    made.save(durable)
    return made


DATA = 4096
RANGES = [
    (0, 0, DATA),
    (0, DATA, DATA + 8 * MIB),
    (0, DATA + 8 * MIB, DATA + 16 * MIB),
    (0, DATA + 16 * MIB, DATA + 17 * MIB),
    (0, DATA + 17 * MIB, DATA + 17 * MIB + 3),
    (1, 0, DATA),
    (1, DATA, DATA + 5),
]


def path(store: DiskStore | RamStore, made: Made, rank: int) -> Path:
    return store.root / image_key(made.id, rank, 2)


def checked(made: Made, *stores: DiskStore | RamStore) -> list[BlockCheck]:
    return list(verify(sources_of(made.id, *stores)))


def bad(checks: list[BlockCheck]) -> list[tuple[str, str, int, int]]:
    return [(c.tier, c.key, c.start_bytes, c.stop_bytes) for c in checks if c.problem is not None]


def test_every_byte_of_every_copy_is_read_and_good(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    checks = checked(made, memory, durable)
    found = {(c.tier, c.key, c.start_bytes, c.stop_bytes) for c in checks}
    expected = {
        (tier, image_key(made.id, rank, 2), start, stop)
        for tier in ("ram", "durable")
        for rank, start, stop in RANGES
    }
    assert found == expected
    assert len(checks) == len(expected)
    assert bad(checks) == []
    assert all(c.found == c.expected for c in checks)


@pytest.mark.parametrize(("rank", "start", "stop"), RANGES)
def test_a_flipped_bit_is_told_as_its_blocks_range(
    made: Made, memory: RamStore, durable: DiskStore, rank: int, start: int, stop: int
) -> None:
    for byte in (start, (start + stop) // 2, stop - 1):
        flip_bit(path(durable, made, rank), 8 * byte + 5)
        checks = checked(made, memory, durable)
        assert bad(checks) == [("durable", image_key(made.id, rank, 2), start, stop)]
        (one,) = [c for c in checks if c.problem]
        assert one.found not in (None, one.expected)
        flip_bit(path(durable, made, rank), 8 * byte + 5)
    assert bad(checked(made, memory, durable)) == []


def test_each_bad_block_is_told(made: Made, durable: DiskStore) -> None:
    key = image_key(made.id, 0, 2)
    for start in (DATA, DATA + 16 * MIB):
        flip_bit(path(durable, made, 0), 8 * start)
    assert bad(checked(made, durable)) == [
        ("durable", key, DATA, DATA + 8 * MIB),
        ("durable", key, DATA + 16 * MIB, DATA + 17 * MIB),
    ]


def test_an_image_that_is_cut_off_is_told_with_what_is_missing(
    made: Made, durable: DiskStore
) -> None:
    key, size = image_key(made.id, 0, 2), DATA + 17 * MIB + 3
    sources = sources_of(made.id, durable)
    os.truncate(path(durable, made, 0), DATA + 9 * MIB)
    assert bad(list(verify(sources))) == [
        ("durable", key, DATA + 9 * MIB, size),
        ("durable", key, DATA + 8 * MIB, DATA + 16 * MIB),
        ("durable", key, DATA + 16 * MIB, DATA + 17 * MIB),
        ("durable", key, DATA + 17 * MIB, size),
    ]


def test_bytes_behind_the_image_are_told(made: Made, durable: DiskStore) -> None:
    size = DATA + 5
    with path(durable, made, 1).open("ab") as file:
        file.write(b"more")
    assert bad(checked(made, durable)) == [("durable", image_key(made.id, 1, 2), size, size + 4)]


def test_an_image_that_is_gone_is_told_as_a_whole(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    sources = sources_of(made.id, memory, durable)
    path(memory, made, 1).unlink()
    found = list(verify(sources))
    assert bad(found) == [("ram", image_key(made.id, 1, 2), 0, DATA + 5)]
    assert len([c for c in found if c.tier == "durable"]) == len(RANGES)
