"""Copies in pieces: every byte arrives, and a wrong byte is reported at any position."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.errors import CheckpointDamagedError
from holdfast.format.names import image_key, part_key
from holdfast.store.disk import FIRST_SIZE_BYTES, PIECE_SIZE_BYTES, DiskStore
from holdfast.store.ram import RamStore
from tests.engine.making import Made, disk, flip_bit, random_array

SIZE_BYTES = 2 * PIECE_SIZE_BYTES + 3
HEADER_BYTES = 4096
"""The first block stands behind it, so blocks reach over the ends of pieces."""


@pytest.fixture(scope="module")
def made() -> Made:
    made = Made()
    made.add(("w",), random_array((SIZE_BYTES,), "uint8", 1))
    return made


@pytest.fixture(params=["seen", "read"])
def source(
    request: pytest.FixtureRequest, memory: RamStore, durable: DiskStore
) -> DiskStore | RamStore:
    """One store with mapped memory, and one that must be read."""
    return memory if request.param == "seen" else durable


def copied(made: Made, source: DiskStore | RamStore, target: DiskStore) -> None:
    (part,) = made.write(source)
    copy_part(source, target, part, PartLayouts(made.spec.arrays))


def test_all_pieces_arrive(made: Made, source: DiskStore | RamStore, tmp_path: Path) -> None:
    target = disk(tmp_path / "target")
    copied(made, source, target)
    for key in (image_key(made.id, 0, 1), part_key(made.id, 0, 1)):
        assert (target.root / key).read_bytes() == (source.root / key).read_bytes()


@pytest.mark.parametrize(
    "at_bytes",
    [
        HEADER_BYTES - 1,
        HEADER_BYTES,
        FIRST_SIZE_BYTES - 1,
        FIRST_SIZE_BYTES,
        PIECE_SIZE_BYTES - 1,
        PIECE_SIZE_BYTES,
        FIRST_SIZE_BYTES + PIECE_SIZE_BYTES,
        HEADER_BYTES + SIZE_BYTES - 1,
    ],
)
def test_a_wrong_byte_is_told_wherever_it_stands(
    made: Made, source: DiskStore | RamStore, tmp_path: Path, at_bytes: int
) -> None:
    target = disk(tmp_path / "target")
    (part,) = made.write(source)
    flip_bit(source.root / image_key(made.id, 0, 1), 8 * at_bytes)
    with pytest.raises(CheckpointDamagedError, match="changed after they were written"):
        copy_part(source, target, part, PartLayouts(made.spec.arrays))
    assert list(target.list("checkpoints")) == []
