"""An image is the same in whichever ranges, in whichever order, a store requests its bytes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.saving.part_writer import ImageSource
from holdfast.engine.transfer.copy import copy_part
from holdfast.errors import CheckpointDamagedError
from holdfast.format.digests import BLOCK_SIZE_BYTES
from holdfast.format.layout import Chunk
from holdfast.format.names import image_key
from holdfast.store.contract import Source, source_of
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.engine.making import Made, flip_bit, random_array

SIZES = (2 * BLOCK_SIZE_BYTES + 5, 0, 4096, 1, BLOCK_SIZE_BYTES)
PART_SIZE_BYTES = 5 * 1024 * 1024


@pytest.fixture(scope="module")
def made() -> Made:
    made = Made()
    for number, size in enumerate(SIZES):
        made.add((f"w{number}",), random_array((size,), "uint8", number))
    return made


def parts_of(source: Source, order: int) -> bytes:
    """All bytes, requested by four threads in parts that are shuffled with the seed `order`."""
    ranges = [
        (start, min(start + PART_SIZE_BYTES, source.size_bytes))
        for start in range(0, source.size_bytes, PART_SIZE_BYTES)
    ]
    shuffled = random.Random(order).sample(ranges, len(ranges))
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda r: b"".join(source.blocks(*r)), shuffled)
        found = dict(zip(shuffled, parts, strict=True))
    return b"".join(found[r] for r in ranges)


@pytest.mark.parametrize("order", range(3))
def test_parts_in_any_order_make_the_image_and_its_digests(
    made: Made, durable: DiskStore, order: int
) -> None:
    (record,) = made.write(durable)
    expected = (durable.root / image_key(made.id, 0, 1)).read_bytes()
    image = ImageSource(made.plan(0).layout, made.chunk_bytes)
    for _ in range(2):
        assert parts_of(image, order) == expected
        assert tuple(image.digests) == record.blocks


def test_each_chunk_is_requested_once_for_parts_in_order(made: Made) -> None:
    requested: list[Chunk] = []

    def chunk_bytes(chunk: Chunk) -> memoryview:
        requested.append(chunk)
        return made.chunk_bytes(chunk)

    image = ImageSource(made.plan(0).layout, chunk_bytes)
    for start in range(0, image.size_bytes, 4096):
        for _ in image.blocks(start, min(start + 4096, image.size_bytes)):
            pass
    assert len(requested) == len(SIZES) - 1


class UploadsParts:
    """A store that requests the parts of an object as a bucket does."""

    tier = name = "durable"
    is_in_memory = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, source: object) -> None:
        self.objects[key] = parts_of(source_of(source), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", ["memory", "durable"])
def test_parts_of_a_copy_in_any_order_are_checked(
    made: Made, memory: RamStore, durable: DiskStore, tier: str
) -> None:
    source = memory if tier == "memory" else durable
    (part,) = made.write(source)
    key, target = image_key(made.id, 0, 1), UploadsParts()
    copy_part(source, target, part, PartLayouts(made.spec.arrays))  # type: ignore[arg-type]
    assert target.objects[key] == (source.root / key).read_bytes()
    for at_bytes in (PART_SIZE_BYTES - 1, PART_SIZE_BYTES, len(target.objects[key]) - 1):
        flip_bit(source.root / key, 8 * at_bytes)
        with pytest.raises(CheckpointDamagedError, match="changed after they were written"):
            copy_part(source, target, part, PartLayouts(made.spec.arrays))  # type: ignore[arg-type]
        flip_bit(source.root / key, 8 * at_bytes)
