"""Checkpoints that reuse earlier images: each reads as it was saved, whatever is deleted.

The oracle is NumPy: the arrays of each `Made`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import commit, read_part, remove
from holdfast.engine.lifecycle.references import remove_durable
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.reading.sources import is_sound
from holdfast.engine.reading.verify import verify
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.errors import CheckpointDamagedError, HoldfastError, StorageError
from holdfast.format.check import CHUNK_COUNT_MAX
from holdfast.format.grid import RestoreTarget
from holdfast.format.names import image_key, manifest_key, part_key, reused_image_key
from holdfast.format.records import Manifest, PartRecord, ReusedImage
from holdfast.format.sealed import record_digest, seal, unseal
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.attempts import checkpoint_id
from tests.engine.making import (
    Made,
    checkpoints,
    disk,
    flip_bit,
    memory_folder,
    random_array,
    same_bits,
    sources_of,
)
from tests.engine.reusing import Chain
from tests.engine.stores import WatchingStore, ram
from tests.engine.test_restore import assert_filled, whole_targets

BLOCK = 8 * 1024 * 1024
FROZEN, TUNED = ("frozen",), ("tuned",)


def persist(memory: Store, durable: Store, made: Made) -> None:
    """Copies all parts to the durable tier and commits."""
    for rank in range(made.part_count):
        part = read_part(memory, made.id, rank, made.part_count)
        copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
    commit(durable, made.id, made.part_count)


def assert_reads(made: Made, *stores: Store) -> None:
    """Every array reads as it was saved."""
    sources = sources_of(made.id, *stores)
    targets = whole_targets(made)
    fill_targets(sources, targets)
    assert_filled(made, targets)
    assert [c for c in verify(sources) if c.problem] == []


@settings(max_examples=60)
@given(checkpoints(), st.data())
def test_any_sequence_of_changes_reads_exactly_whatever_was_deleted(
    made: Made, data: st.DataObject
) -> None:
    paths = [spec.path for spec in made.specs]
    with memory_folder() as folder:
        memory, durable = ram(Path(folder) / "ram"), disk(Path(folder) / "run")
        chain, in_ram, on_disk = Chain(), [made], []
        chain.begin(made, memory)
        for step in range(made.id.step + 1, made.id.step + 6):
            if data.draw(st.booleans(), "is persisted"):
                persist(memory, durable, chain.made[-1])
                on_disk.append(chain.made[-1])
            changed = data.draw(st.sets(st.sampled_from(paths)) if paths else st.just(set()))
            in_ram.append(chain.go_on(memory, changed, step))
            _delete_some(data, memory, in_ram[:-1], in_ram)
            _delete_some(data, durable, on_disk, on_disk)
            for one in in_ram:
                assert_reads(one, memory)
            for one in on_disk:
                assert_reads(one, durable)
        for store, held in ((memory, in_ram), (durable, on_disk)):
            for one in held:
                _remove(store, one)
            assert list_checkpoints(store) == {}
        assert not [p for p in Path(folder, "run").rglob("*") if p.is_file()]
        slots = [*Path(folder, "ram", "slots").iterdir()]
        assert {slot.stat().st_nlink for slot in slots} == {1}
        memory.close()


def _delete_some(
    data: st.DataObject, store: Store, candidates: Sequence[Made], held: list[Made]
) -> None:
    for one in list(candidates):
        if data.draw(st.booleans(), f"{store.tier} loses {one.id}"):
            _remove(store, one)
            held.remove(one)


def _remove(store: Store, one: Made) -> None:
    listed = list_checkpoints(store)
    if isinstance(store, RamStore):
        remove(store, one.id, listed[one.id])
    else:
        remove_durable(store, listed, [one.id])


def _begun() -> Made:
    """One rank: an array of three blocks that stays, and a small one that changes."""
    made = Made(id=checkpoint_id(1))
    made.add(FROZEN, random_array((2 * BLOCK + 128,), "uint8", 1))
    made.add(TUNED, random_array((1000,), "float32", 2))
    return made


@pytest.fixture
def chain(memory: RamStore) -> Chain:
    """Steps 1, 2 and 3 in RAM; the last two reuse the first one's image for the unchanged array."""
    found = Chain()
    found.begin(_begun(), memory)
    for step in (2, 3):
        found.go_on(memory, [TUNED], step)
    return found


def reused_path(store: DiskStore | RamStore, made: Made, origin: int = 1) -> Path:
    """Where the image that `made` reuses is: in RAM under a name of its own."""
    if isinstance(store, RamStore):
        return store.root / reused_image_key(made.id, 0, 1, checkpoint_id(origin))
    return store.root / image_key(checkpoint_id(origin), 0, 1)


def test_what_stays_is_written_once_in_every_tier(
    chain: Chain, memory: RamStore, durable: DiskStore
) -> None:
    for made in chain.made:
        persist(memory, durable, made)
    for store in (memory, durable):
        first = (store.root / image_key(chain.made[0].id, 0, 1)).stat()
        for made in chain.made[1:]:
            assert reused_path(store, made).stat().st_ino == first.st_ino
            own = store.root / image_key(made.id, 0, 1)
            assert own.stat().st_size == 4096 + 4000
            listing = list_checkpoints(store)[made.id]
            assert listing.written_bytes == own.stat().st_size
            in_folder = first.st_size if store is memory else 0
            assert listing.size_bytes - listing.written_bytes == in_folder


def test_where_the_origin_was_never_durable_the_reused_image_is_copied_from_ram(
    chain: Chain, memory: RamStore, durable: DiskStore
) -> None:
    persist(memory, durable, chain.made[2])
    assert_reads(chain.made[2], durable)
    # A later one finds it by the name that it has there.
    chain.go_on(memory, [TUNED], 4)
    watched = WatchingStore(memory)
    persist(watched, durable, chain.made[3])
    reused = reused_image_key(chain.made[3].id, 0, 1, checkpoint_id(1))
    assert reused not in {key for key, _, _ in watched.reads}
    assert not list_checkpoints(durable)[chain.made[0].id].has_records
    assert_reads(chain.made[3], durable)


def test_a_part_that_was_copied_half_before_is_copied_again(
    chain: Chain, memory: RamStore, durable: DiskStore
) -> None:
    # The reused image was copied, since its origin was not durable; by now it is.
    second = chain.made[1]
    persist(memory, durable, second)
    durable.delete(manifest_key(second.id))
    durable.delete(part_key(second.id, 0, 1))
    persist(memory, durable, chain.made[0])
    persist(memory, durable, second)
    assert_reads(second, durable)


def test_only_the_very_image_is_reused(chain: Chain, memory: RamStore, durable: DiskStore) -> None:
    # Something of the same name and length, as of a save that was tried twice, is not it.
    first, second = chain.made[:2]
    size = (memory.root / image_key(first.id, 0, 1)).stat().st_size
    durable.put(image_key(first.id, 0, 1), bytes(size))
    persist(memory, durable, second)
    assert_reads(second, durable)
    durable.put(image_key(first.id, 0, 1), b"other")
    persist(memory, durable, chain.made[2])
    assert_reads(chain.made[2], durable)


def test_an_image_that_a_record_describes_is_not_replaced_by_another(
    chain: Chain, memory: RamStore, durable: DiskStore
) -> None:
    first, second = chain.made[:2]
    persist(memory, durable, first)
    durable.put(image_key(first.id, 0, 1), b"other")
    with pytest.raises(StorageError, match="found another one, which is not replaced"):
        persist(memory, durable, second)
    assert durable.get(image_key(first.id, 0, 1)) == b"other"


def test_a_reused_image_that_is_bad_in_ram_is_not_made_durable(
    chain: Chain, memory: RamStore, durable: DiskStore
) -> None:
    flip_bit(reused_path(memory, chain.made[1]), 8 * (4096 + 50))
    with pytest.raises(CheckpointDamagedError, match=r"from-000000001\.1-00000001.*\[4096, "):
        persist(memory, durable, chain.made[1])
    assert list_checkpoints(durable).get(chain.made[1].id) is None


def test_what_a_reused_image_has_besides_may_be_anything(
    chain: Chain, memory: RamStore, durable: DiskStore
) -> None:
    # The part's record has no digest of it: it is the old one's.
    path = reused_path(memory, chain.made[1])
    flip_bit(path, 8 * (path.stat().st_size - 10))
    assert_reads(chain.made[1], memory)
    persist(memory, durable, chain.made[1])
    assert_reads(chain.made[1], durable)
    with pytest.raises(CheckpointDamagedError):
        persist(memory, durable, chain.made[0])


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_bad_block_of_a_reused_image_is_told_by_its_own_file_and_read_elsewhere(
    chain: Chain, memory: RamStore, durable: DiskStore, block: int
) -> None:
    made = chain.made[1]
    for one in chain.made[:2]:
        persist(memory, durable, one)
    start = 4096 + block * BLOCK
    flip_bit(reused_path(memory, made), 8 * (start + 60))
    key = reused_image_key(made.id, 0, 1, checkpoint_id(1))
    sources = sources_of(made.id, memory, durable)
    bad = [(c.tier, c.key, c.start_bytes) for c in verify(sources) if c.problem]
    assert bad == [("ram", key, start)]
    targets = whole_targets(made)
    tally = fill_targets(sources, targets)
    assert_filled(made, targets)
    (reason,) = tally.passed_over
    assert f"ram: {key}: bytes [{start}, " in reason
    with pytest.raises(CheckpointDamagedError, match="from-000000001"):
        fill_targets(sources_of(made.id, memory), whole_targets(made))


def test_a_bad_reused_image_may_be_lent_nowhere_and_a_good_one_is_not_copied(
    chain: Chain, memory: RamStore
) -> None:
    made = chain.made[2]
    taken = []

    def targets() -> list[RestoreTarget]:
        found = whole_targets(made)
        return [_taking(one, taken) for one in found]

    fill_targets(sources_of(made.id, memory), targets())
    assert len(taken) == 2
    for array, spec in zip(sorted(taken, key=lambda a: -a.nbytes), made.specs, strict=True):
        assert same_bits(array, made.arrays[spec.path])
        assert not array.flags.writeable
        assert array.base is not None
    del array
    taken.clear()
    flip_bit(reused_path(memory, made), 8 * (4096 + 50))
    with pytest.raises(CheckpointDamagedError):
        fill_targets(sources_of(made.id, memory), targets())


def _taking(one: RestoreTarget, taken: list) -> RestoreTarget:
    """The same target, which accepts the store's own memory."""
    return RestoreTarget(
        array_index=one.array_index, region=one.region, buffer=one.buffer, take=taken.append
    )


@pytest.mark.parametrize("damage", ["gone", "short", "long"])
def test_a_reused_image_of_another_length_is_not_sound(
    chain: Chain, memory: RamStore, durable: DiskStore, damage: str
) -> None:
    made = chain.made[1]
    for one in chain.made[:2]:
        persist(memory, durable, one)
    path = reused_path(durable, made)
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (-1 if damage == "short" else 1))
    listings = {"durable": list_checkpoints(durable), "ram": list_checkpoints(memory)}
    assert not is_sound(made.id, [durable], listings)
    assert is_sound(made.id, [memory, durable], listings)
    if damage != "long":
        with pytest.raises(CheckpointDamagedError, match=r"000000001\.1-00000001/image-00000"):
            sources_of(made.id, durable)
    assert_reads_from_ram(made, memory, durable)


def assert_reads_from_ram(made: Made, memory: Store, durable: Store) -> None:
    targets = whole_targets(made)
    tally = fill_targets(sources_of(made.id, memory, durable), targets)
    assert_filled(made, targets)
    assert set(tally.bytes_by_tier) == {"ram"}


def _resealed(store: DiskStore, part: PartRecord, reused: tuple[ReusedImage, ...]) -> None:
    """Writes the part's record, and the manifest over it, with other reused images."""
    data = seal(msgspec.structs.replace(part, reused=reused))
    store.put(part_key(part.id, 0, 1), data)
    manifest = unseal(store.get(manifest_key(part.id)), Manifest, "")
    reference = msgspec.structs.replace(
        manifest.parts[0],
        record_digest=record_digest(data),
        origins=tuple((image.origin.step, image.image_size_bytes) for image in reused),
    )
    data = seal(msgspec.structs.replace(manifest, parts=(reference,)))
    store.put(manifest_key(part.id), data)


@pytest.mark.parametrize(
    "change",
    [
        {"used": ((0, 2),)},
        {"used": ((0, 3),), "laid": ((0, 3),)},
        {"laid": ((0, CHUNK_COUNT_MAX),)},
        {"laid": ((0, 10**18),)},
        {"used": ((0, 10**18),), "laid": ((0, 10**18),)},
        {"used": ()},
        {"used": ((1, 2),)},
        {"laid": ((0, 1),)},
        {"laid": ((0, 1),), "used": ((0, 2),)},
        {"laid": ((0, 1),), "used": ((1, 2),)},
        {"laid": ((1, 2), (0, 1))},
        {"laid": ((0, 1), (1, 2))},
        {"laid": ((-1, 2),)},
        {"image_size_bytes": 4096},
        {"image_size_bytes": -1},
        {"image_size_bytes": 10**18},
        {"origin": checkpoint_id(2)},
        {"origin": checkpoint_id(0)},
        {"origin": checkpoint_id(-1)},
        {"origin": checkpoint_id(1, 2)},
        {"origin": checkpoint_id(5)},
        {"header_digest": ""},
    ],
    ids=str,
)
def test_a_record_that_says_wrong_things_of_a_reused_image_is_refused(
    chain: Chain, memory: RamStore, durable: DiskStore, change: dict
) -> None:
    made = chain.made[1]
    for one in chain.made[:2]:
        persist(memory, durable, one)
    (part,) = chain.records[1]
    (reused,) = part.reused
    _resealed(durable, part, (msgspec.structs.replace(reused, **change),))
    with pytest.raises(CheckpointDamagedError):
        fill_targets(sources_of(made.id, durable), whole_targets(made))
    _resealed(durable, part, (reused,))
    assert_reads(made, durable)


@pytest.mark.parametrize("count", [0, 2, 17])
def test_a_record_with_another_number_of_reused_images_is_refused(
    chain: Chain, memory: RamStore, durable: DiskStore, count: int
) -> None:
    made = chain.made[1]
    for one in chain.made[:2]:
        persist(memory, durable, one)
    (part,) = chain.records[1]
    (reused,) = part.reused
    _resealed(durable, part, (reused,) * count)
    with pytest.raises(CheckpointDamagedError):
        sources_of(made.id, durable)


def test_an_unreadable_part_stops_no_listing(chain: Chain, memory: RamStore) -> None:
    made = chain.made[2]
    memory.delete(reused_image_key(made.id, 0, 1, checkpoint_id(1)))
    with pytest.raises(HoldfastError, match="is missing"):
        sources_of(made.id, memory)
    assert_reads(chain.made[1], memory)
