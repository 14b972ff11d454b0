"""Which copies of a checkpoint there are, and which of them count."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.reading.sources import find_sources, is_sound, readable
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.errors import CheckpointDamagedError, NewerFormatError, StepUncommittedError
from holdfast.format.names import image_key, manifest_key, part_key
from holdfast.format.records import Manifest, PartRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.attempts import checkpoint_id
from tests.engine.making import Made, flip_bit, random_array, sources_of
from tests.engine.test_restore import assert_filled, whole_targets


@pytest.fixture
def made() -> Made:
    made = Made(part_count=2)
    made.add(("w",), random_array((2, 9), "float32", 1), (1, 9), ((0, 1), (1, 1)))
    return made


def listings(*stores: Store) -> dict:
    return {store.name: list_checkpoints(store) for store in stores}


def tiers(made: Made, *stores: Store) -> list[list[str]]:
    return [[c.store.tier for c in copies] for copies in sources_of(made.id, *stores).parts]


def assert_readable(made: Made, *stores: Store) -> None:
    targets = whole_targets(made)
    fill_targets(sources_of(made.id, *stores), targets)
    assert_filled(made, targets)


def rewrite(store: DiskStore, key: str, kind: type, **changes: object) -> None:
    """Changes a record and seals it again, as a broken writer would."""
    data = seal(msgspec.structs.replace(unseal(store.get(key), kind, key), **changes))
    store.put(key, data)


def test_copies_are_in_the_order_of_nearness(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    for part in made.write(memory):
        copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
    made.save(durable)
    assert tiers(made, memory, durable) == [["ram", "durable"]] * 2
    assert tiers(made, durable) == [["durable"]] * 2


def test_what_is_complete_in_ram_is_readable_before_it_is_durable(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    made.write(memory)
    assert readable(listings(memory, durable)) == [made.id]
    assert is_sound(made.id, [memory, durable], listings(memory, durable))
    assert_readable(made, memory, durable)


def test_parts_in_different_tiers_make_one_checkpoint(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    made.write(memory, [0])
    made.write(durable, [1])
    assert readable(listings(memory, durable)) == [made.id]
    assert tiers(made, memory, durable) == [["ram"], ["durable"]]
    assert_readable(made, memory, durable)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_is_missing_everywhere_makes_it_uncommitted(
    made: Made, memory: RamStore, durable: DiskStore, rank: int
) -> None:
    made.write(memory, [rank])
    made.write(durable, [rank])
    assert readable(listings(memory, durable)) == []
    assert not is_sound(made.id, [memory, durable], listings(memory, durable))
    with pytest.raises(StepUncommittedError, match=r"1 of 2 parts.*choose another step"):
        sources_of(made.id, memory, durable)


def test_a_checkpoint_that_nobody_has_is_uncommitted(durable: DiskStore) -> None:
    with pytest.raises(StepUncommittedError):
        find_sources(checkpoint_id(5), [durable], listings(durable))


@pytest.mark.parametrize("what", ["cut", "flipped", "empty"])
def test_torn_manifest_is_never_restored(made: Made, durable: DiskStore, what: str) -> None:
    made.save(durable)
    path = durable.root / manifest_key(made.id)
    data = path.read_bytes()
    for count in range(0, len(data), 7):
        if what == "flipped":
            flip_bit(path, 8 * count + count % 8)
        else:
            path.write_bytes(data[:count] if what == "cut" else b"")
        with pytest.raises(CheckpointDamagedError, match=r"^durable: .*manifests/"):
            sources_of(made.id, durable)
        assert not is_sound(made.id, [durable], listings(durable))
        path.write_bytes(data)
    assert_readable(made, durable)


def test_a_damaged_manifest_does_not_hide_what_is_complete_in_ram(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    for part in made.write(memory):
        copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
    made.save(durable)
    flip_bit(durable.root / manifest_key(made.id), 300)
    assert_readable(made, memory, durable)


def test_a_manifest_of_another_checkpoint_is_damaged(made: Made, durable: DiskStore) -> None:
    made.save(durable)
    other = Made(id=checkpoint_id(20), part_count=2, arrays=made.arrays, specs=made.specs)
    other.save(durable)
    data = durable.get(manifest_key(other.id))
    durable.put(manifest_key(made.id), data)
    with pytest.raises(CheckpointDamagedError, match=r"the manifest of 000000020\.1-00000001"):
        sources_of(made.id, durable)


def test_a_manifest_of_a_newer_format_is_told_as_newer(made: Made, durable: DiskStore) -> None:
    made.save(durable)
    rewrite(durable, manifest_key(made.id), Manifest, format_version=2)
    with pytest.raises(NewerFormatError):
        sources_of(made.id, durable)


@pytest.mark.parametrize(
    "key", [part_key(checkpoint_id(10), 1, 2), image_key(checkpoint_id(10), 1, 2)]
)
def test_a_committed_part_that_is_gone_is_damage(made: Made, durable: DiskStore, key: str) -> None:
    made.save(durable)
    durable.delete(key)
    assert not is_sound(made.id, [durable], listings(durable))
    with pytest.raises(CheckpointDamagedError, match="no good copy of part 1 of 2"):
        sources_of(made.id, durable)


def test_a_committed_checkpoint_with_a_part_gone_is_not_passed_over_unseen(
    made: Made, durable: DiskStore
) -> None:
    # It must be listed as readable: otherwise no reason is reported for using an older one.
    made.save(durable)
    durable.delete(image_key(made.id, 1, 2))
    assert readable(listings(durable)) == [made.id]


def test_an_image_of_another_length_is_not_sound(made: Made, durable: DiskStore) -> None:
    made.save(durable)
    assert is_sound(made.id, [durable], listings(durable))
    path = durable.root / image_key(made.id, 1, 2)
    data = path.read_bytes()
    for changed in (data[:-1], data + b"x", b""):
        path.write_bytes(changed)
        assert not is_sound(made.id, [durable], listings(durable))


def test_a_short_image_with_a_whole_copy_elsewhere_is_sound(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    for part in made.write(memory):
        copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
    made.save(durable)
    path = durable.root / image_key(made.id, 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert is_sound(made.id, [memory, durable], listings(memory, durable))


@pytest.mark.parametrize(
    "changes",
    [{"blocks": ()}, {"blocks": ("0" * 32,) * 2}, {"image_size_bytes": 4095}],
    ids=["fewer blocks", "more blocks", "another size"],
)
def test_a_part_that_is_not_what_the_arrays_make_is_damage(
    made: Made, durable: DiskStore, changes: dict
) -> None:
    made.write(durable)
    rewrite(durable, part_key(made.id, 1, 2), PartRecord, **changes)
    with pytest.raises(CheckpointDamagedError):
        sources_of(made.id, durable)


def test_checkpoints_are_readable_in_order_and_only_whole_ones(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    def at(step: int, attempt: int) -> Made:
        return Made(
            id=checkpoint_id(step, attempt), part_count=2, arrays=made.arrays, specs=made.specs
        )

    at(30, 1).save(durable)
    at(20, 2).write(memory)
    at(20, 1).save(durable)
    at(40, 1).write(memory, [0])
    at(10, 1).write(durable, [1])
    assert readable(listings(memory, durable)) == [
        checkpoint_id(20),
        checkpoint_id(20, 2),
        checkpoint_id(30),
    ]


def test_parts_that_the_next_commit_removes_are_readable_in_ram_alone(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    """As a delete that was interrupted after the manifest, or a failed save, leaves them."""

    def at(step: int, attempt: int) -> Made:
        return Made(
            id=checkpoint_id(step, attempt), part_count=2, arrays=made.arrays, specs=made.specs
        )

    for one in (at(10, 1), at(20, 1), at(30, 2), at(40, 1)):
        one.write(durable)
    at(30, 1).save(durable)
    # Later than every commit, or of a newer attempt than those: an opening finishes them.
    unfinished = [checkpoint_id(30, 2), checkpoint_id(40)]
    assert readable(listings(durable)) == [checkpoint_id(30), *unfinished]
    at(20, 1).write(memory)
    assert checkpoint_id(20) in readable(listings(memory, durable))
    at(40, 2).save(durable)
    assert readable(listings(durable)) == [checkpoint_id(30), checkpoint_id(40, 2)]
