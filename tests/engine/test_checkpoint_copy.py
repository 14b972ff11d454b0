"""Copies of committed checkpoints to another durable place, while copies of them come and go."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints, list_folder
from holdfast.engine.lifecycle.commit import commit, is_committed, remove
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.tiers.checkpoint_copy import commit_copy, copy_part_once, part_copies
from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError
from holdfast.format.digests import BLOCK_SIZE_BYTES, Buffer
from holdfast.format.names import image_key, manifest_key, part_key
from holdfast.format.records import Manifest
from holdfast.store.contract import Source
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.engine.making import Made, disk, flip_bit, random_array

SIZE_BYTES = 3 * BLOCK_SIZE_BYTES + 5


class Watched(DiskStore):
    """A store that calls a function before each block of an image that it writes."""

    on_block: Callable[[int], None] = staticmethod(lambda number: None)
    images = 0

    def put(self, key: str, source: Source | Buffer) -> None:
        if not hasattr(source, "blocks"):
            super().put(key, source)
            return
        self.images += 1
        data = bytearray()
        for number, block in enumerate(source.blocks(0, source.size_bytes)):
            data += block
            self.on_block(number)
        super().put(key, bytes(data))


@pytest.fixture
def made() -> Made:
    made = Made()
    made.add(("w",), random_array((SIZE_BYTES,), "uint8", 1))
    return made


@pytest.fixture
def manifest(made: Made, memory: RamStore, durable: DiskStore) -> Manifest:
    """A checkpoint in RAM that is committed in the durable tier."""
    made.write(memory)
    made.write(durable)
    return commit(durable, made.id, 1)


@pytest.fixture
def target(tmp_path: Path) -> Watched:
    (tmp_path / "target").mkdir()
    return Watched(tmp_path / "target", SystemClock(), tier="remote")


def copy(manifest: Manifest, stores: list[RamStore | DiskStore], target: Watched) -> int:
    layouts = PartLayouts(manifest.checkpoint.arrays)
    copies = part_copies(manifest, 0, stores, layouts)
    return copy_part_once(copies, target, list_folder(target, manifest.id))


def check(manifest: Manifest, durable: DiskStore, target: Watched) -> None:
    """The target's objects are those of the durable tier."""
    commit_copy(durable.get(manifest_key(manifest.id)), target, manifest.id, 1)
    assert is_committed(target, manifest.id)
    for key in (image_key(manifest.id, 0, 1), part_key(manifest.id, 0, 1)):
        assert (target.root / key).read_bytes() == (durable.root / key).read_bytes()


def test_a_slot_is_not_locked_while_the_target_is_slow(
    manifest: Manifest, memory: RamStore, durable: DiskStore, target: Watched
) -> None:
    image, seen = memory.root / image_key(manifest.id, 0, 1), []

    def lock(number: int) -> None:
        fd = os.open(image, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        seen.append(number)

    target.on_block = lock
    copy(manifest, [memory, durable], target)
    assert len(seen) > 3
    check(manifest, durable, target)


def test_blocks_come_from_the_durable_tier_once_ram_is_released(
    manifest: Manifest, memory: RamStore, durable: DiskStore, target: Watched
) -> None:
    def release(number: int) -> None:
        if number == 1:
            remove(memory, manifest.id, list_checkpoints(memory)[manifest.id])

    target.on_block = release
    copy(manifest, [memory, durable], target)
    assert not list_checkpoints(memory)
    check(manifest, durable, target)


def test_a_damaged_block_comes_from_the_other_copy_and_one_damaged_in_both_is_refused(
    manifest: Manifest, memory: RamStore, durable: DiskStore, target: Watched
) -> None:
    key = image_key(manifest.id, 0, 1)
    right = (durable.root / key).read_bytes()
    flip_bit(memory.root / key, 8 * BLOCK_SIZE_BYTES)
    flip_bit(durable.root / key, 8 * 3 * BLOCK_SIZE_BYTES)
    copy(manifest, [memory, durable], target)
    assert (target.root / key).read_bytes() == right
    flip_bit(durable.root / key, 8 * BLOCK_SIZE_BYTES)
    target.delete(part_key(manifest.id, 0, 1), key)
    with pytest.raises(CheckpointDamagedError, match="digest"):
        copy(manifest, [memory, durable], target)
    with pytest.raises(ObjectNotFoundError):
        commit_copy(durable.get(manifest_key(manifest.id)), target, manifest.id, 1)
    assert not is_committed(target, manifest.id)


def test_a_part_that_is_there_is_not_copied_again(
    manifest: Manifest, memory: RamStore, durable: DiskStore, target: Watched
) -> None:
    assert copy(manifest, [memory, durable], target) > SIZE_BYTES
    assert copy(manifest, [memory, durable], target) == 0
    assert target.images == 1
    # Without its record, a part may be half there.
    target.delete(part_key(manifest.id, 0, 1))
    copy(manifest, [memory, durable], target)
    assert target.images == 2
    check(manifest, durable, target)


def test_another_record_of_the_same_name_is_no_copy(
    manifest: Manifest, memory: RamStore, durable: DiskStore, target: Watched, tmp_path: Path
) -> None:
    other = Made()
    other.add(("w",), random_array((SIZE_BYTES,), "uint8", 2))
    elsewhere = disk(tmp_path / "elsewhere")
    other.write(elsewhere)
    copy(manifest, [elsewhere, durable], target)
    check(manifest, durable, target)
    with pytest.raises(CheckpointDamagedError, match="not the committed record"):
        copy(manifest, [elsewhere], target)
