"""Only the needed parts of a checkpoint are laid out; all are checked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.reading.sources import CheckpointSources, is_sound
from holdfast.engine.reading.verify import verify
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.errors import CheckpointDamagedError
from holdfast.format.names import image_key, manifest_key, part_key
from holdfast.format.records import PartRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.disk import DiskStore
from tests.engine.making import Made, disk, memory_folder, random_array, regions, sources_of
from tests.engine.test_restore import assert_filled, target, whole_targets

RANKS = 48


def made_by_many(store: DiskStore, count: int = RANKS) -> Made:
    """A row of `w` on each rank, and of `v`, whose owners are the other way round."""
    made = Made(part_count=count)
    made.add(("w",), random_array((count, 9), "float32", 1), (1, 9), [(r, 1) for r in range(count)])
    backwards = [(r, 1) for r in reversed(range(count))]
    made.add(("v",), random_array((count, 5), "int16", 2), (1, 5), backwards)
    made.save(store)
    return made


def laid_out(sources: CheckpointSources) -> set[int]:
    return set(sources.layouts._whole)


@pytest.mark.parametrize(
    ("region", "ranks"),
    [(((5, 0), (6, 9)), {5}), (((5, 3), (8, 4)), {5, 6, 7}), (((9, 9), (12, 9)), set())],
    ids=str,
)
def test_only_the_parts_that_hold_a_wanted_element_are_laid_out(
    durable: DiskStore, region: tuple, ranks: set[int]
) -> None:
    made = made_by_many(durable)
    sources = sources_of(made.id, durable)
    assert laid_out(sources) == set()
    targets = [target(made, 0, region)]
    fill_targets(sources, targets)
    assert_filled(made, targets)
    assert laid_out(sources) == ranks


@given(st.data())
def test_the_parts_that_are_laid_out_are_the_owners_of_what_is_wanted(data: st.DataObject) -> None:
    with memory_folder() as folder:
        store = disk(Path(folder))
        made = made_by_many(store, 7)
        sources = sources_of(made.id, store)
        w, v = data.draw(regions((7, 9))), data.draw(regions((7, 5)))
        fill_targets(sources, [target(made, 0, w), target(made, 1, v)])
    expected = set()
    if w[0][1] < w[1][1]:
        expected |= set(range(w[0][0], w[1][0]))
    if v[0][1] < v[1][1]:
        expected |= {6 - row for row in range(v[0][0], v[1][0])}
    assert laid_out(sources) == expected


def test_to_list_what_is_there_nothing_is_laid_out(
    durable: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_by_many(durable)

    def refused(*_: object) -> object:
        raise AssertionError("a part was laid out")

    monkeypatch.setattr("holdfast.engine.saving.part_layouts.image_layout", refused)
    assert is_sound(made.id, [durable], {durable.name: list_checkpoints(durable)})
    with pytest.raises(AssertionError, match="laid out"):
        fill_targets(sources_of(made.id, durable), whole_targets(made))


def lengthen(store: DiskStore, made: Made, rank: int) -> None:
    """A broken writer's part: its image has a header of a page more than its chunks make."""
    key = part_key(made.id, rank, made.part_count)
    part = unseal(store.get(key), PartRecord, key)
    longer = msgspec.structs.replace(part, image_size_bytes=part.image_size_bytes + 4096)
    store.put(key, seal(longer))
    path = store.root / image_key(made.id, rank, made.part_count)
    path.write_bytes(path.read_bytes() + bytes(4096))


def test_a_header_of_another_length_is_refused_where_its_part_is_read(durable: DiskStore) -> None:
    made = made_by_many(durable, 3)
    durable.delete(manifest_key(made.id))
    lengthen(durable, made, 1)
    sources = sources_of(made.id, durable)
    others = [target(made, 0, ((0, 0), (1, 9))), target(made, 0, ((2, 0), (3, 9)))]
    fill_targets(sources, others)
    assert_filled(made, others)
    with pytest.raises(
        CheckpointDamagedError, match=r"part 1 of 000000010\.1-00000001.*the arrays make"
    ):
        fill_targets(sources, whole_targets(made))
    with pytest.raises(CheckpointDamagedError, match="the arrays make"):
        list(verify(sources))


@pytest.mark.parametrize("change_bytes", [-4096, 1, -1, 2048])
def test_an_image_that_cannot_hold_its_chunks_is_refused_whoever_reads(
    durable: DiskStore, change_bytes: int
) -> None:
    made = made_by_many(durable, 3)
    durable.delete(manifest_key(made.id))
    key = part_key(made.id, 1, 3)
    part = unseal(durable.get(key), PartRecord, key)
    size_bytes = part.image_size_bytes + change_bytes
    data = seal(msgspec.structs.replace(part, image_size_bytes=size_bytes))
    durable.put(key, data)
    path = durable.root / image_key(made.id, 1, 3)
    path.write_bytes(path.read_bytes() + bytes(4096))
    with pytest.raises(CheckpointDamagedError, match="a header of a multiple of 4096"):
        sources_of(made.id, durable)


def test_what_the_same_arrays_make_is_made_once_for_checkpoints_after_one_another() -> None:
    made = Made(part_count=2)
    made.add(("w",), random_array((2, 9), "float32", 1), (1, 9), [(0, 1), (1, 1)])
    one = PartLayouts(made.spec.arrays)
    again = PartLayouts(made.spec.arrays, one)
    assert again.whole(1) is one.whole(1)
    made.add(("v",), random_array((4,), "int16", 2))
    other = PartLayouts(made.spec.arrays, again)
    assert other.whole(0) == PartLayouts(made.spec.arrays).whole(0)
    assert other.whole(0) != one.whole(0)
