"""Images stay in the durable tier while a checkpoint needs them, and not longer.

Steps 1, 2 and 3 of a chain are durable; steps 2 and 3 reuse the image of step 1 for one array.
"""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.lifecycle.recovery import recover
from holdfast.engine.lifecycle.references import ReusedImages, remove_durable
from holdfast.engine.lifecycle.run import create_run
from holdfast.errors import CheckpointDamagedError, NewerFormatError
from holdfast.format.names import CheckpointId, image_key, manifest_key, part_key
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.attempts import checkpoint_id
from tests.engine.making import RUN_ID, TIME, Made, begin, disk, flip_bit, random_array
from tests.engine.reusing import Chain
from tests.engine.stores import POINTS, DiedError, DyingStore
from tests.engine.test_reused_images import assert_reads, persist

BASE, HEAD = ("base",), ("head",)
FIRST, SECOND, THIRD = (checkpoint_id(step) for step in (1, 2, 3))
IMAGE = image_key(FIRST, 0, 1)


@pytest.fixture
def chain(durable: DiskStore) -> Chain:
    create_run(durable, "run", RUN_ID, TIME)
    begin(durable, None)
    made = Made(id=FIRST)
    made.add(BASE, random_array((5000,), "float32", 1))
    made.add(HEAD, random_array((100,), "float32", 2))
    found = Chain()
    found.begin(made, durable)
    found.commit(durable, made)
    for step in (2, 3):
        found.commit(durable, found.go_on(durable, [HEAD], step))
    return found


def delete(store: DiskStore | DyingStore, *checkpoints: CheckpointId, **options: object) -> list:
    return remove_durable(store, list_checkpoints(store), checkpoints, **options)


def keys(store: DiskStore) -> list[str]:
    return [stored.key for stored in store.list("checkpoints")]


def test_an_image_goes_with_the_last_checkpoint_that_names_it(
    chain: Chain, durable: DiskStore
) -> None:
    images = ReusedImages()
    assert delete(durable, FIRST, images=images) == [FIRST]
    assert keys(durable)[0] == IMAGE
    assert [key for key in keys(durable) if f"{FIRST}/" in key] == [IMAGE]
    # Its folder is no checkpoint, and there is nothing left of it to remove.
    assert delete(durable, FIRST, images=images) == []
    delete(durable, THIRD, images=images)
    assert_reads(chain.made[1], durable)
    delete(durable, SECOND, images=images)
    assert keys(durable) == []


def test_all_together_leave_nothing(chain: Chain, durable: DiskStore) -> None:
    assert delete(durable, THIRD, FIRST, SECOND) == [FIRST, SECOND, THIRD]
    assert keys(durable) == []


def test_an_image_that_an_unfinished_checkpoint_names_stays(
    chain: Chain, durable: DiskStore
) -> None:
    durable.delete(manifest_key(THIRD))
    delete(durable, FIRST, SECOND)
    assert IMAGE in keys(durable)
    commit(durable, THIRD, 1)
    assert_reads(chain.made[2], durable)


def test_the_image_of_a_checkpoint_that_is_being_written_is_not_taken_for_remains(
    chain: Chain, durable: DiskStore
) -> None:
    """It was copied for a later checkpoint, or its own record is not written yet."""
    delete(durable, FIRST)
    delete(durable, SECOND, THIRD, in_care=[FIRST])
    assert keys(durable) == [IMAGE]


def test_a_checkpoint_keeps_its_own_image_when_those_that_reuse_it_go(
    chain: Chain, durable: DiskStore
) -> None:
    delete(durable, SECOND, THIRD)
    assert_reads(chain.made[0], durable)


@pytest.mark.parametrize("key", [manifest_key(THIRD), part_key(THIRD, 0, 1)])
def test_a_damaged_record_keeps_all_that_it_could_name(
    chain: Chain, durable: DiskStore, key: str
) -> None:
    if key != manifest_key(THIRD):
        durable.delete(manifest_key(THIRD))
    flip_bit(durable.root / key, 800)
    delete(durable, FIRST, SECOND)
    kept = [name for name in keys(durable) if str(THIRD) not in name]
    assert kept == [IMAGE, image_key(SECOND, 0, 1)]
    delete(durable, THIRD)
    delete(durable, FIRST, SECOND)
    assert keys(durable) == []


def test_records_of_a_newer_format_are_no_damage_and_nothing_is_removed(
    chain: Chain, durable: DiskStore
) -> None:
    before = keys(durable)
    data = durable.get(manifest_key(THIRD))
    durable.put(manifest_key(THIRD), _newer(data))
    with pytest.raises(NewerFormatError):
        delete(durable, FIRST)
    assert keys(durable) == before


def _newer(data: bytes) -> bytes:
    from xxhash import xxh3_128_hexdigest

    body = data[:-46].replace(b'"format_version":1', b'"format_version":9')
    return body + b',"digest":"%s"}\n' % xxh3_128_hexdigest(body).encode()


def test_nothing_is_committed_that_names_a_missing_or_another_image(
    chain: Chain, durable: DiskStore
) -> None:
    durable.delete(manifest_key(THIRD))
    data = durable.get(IMAGE)
    durable.put(IMAGE, data[:-1])
    with pytest.raises(CheckpointDamagedError, match=f"reuses {IMAGE}"):
        commit(durable, THIRD, 1)
    durable.delete(IMAGE)
    with pytest.raises(CheckpointDamagedError, match="found no such image"):
        commit(durable, THIRD, 1)
    # An opening does not wait for the image: it removes what can never be read.
    assert recover(durable, []).cleared == (THIRD,)
    assert THIRD not in list_checkpoints(durable)


def test_an_opening_finishes_a_checkpoint_whose_origin_is_only_an_image(
    chain: Chain, durable: DiskStore
) -> None:
    delete(durable, FIRST, SECOND)
    durable.delete(manifest_key(THIRD))
    found = recover(durable, [])
    assert (found.committed, found.cleared) == ((THIRD,), ())
    assert_reads(chain.made[2], durable)


def test_an_opening_removes_images_that_nothing_names(chain: Chain, durable: DiskStore) -> None:
    """As left by a host that does not lead, or by a deletion that was cut off."""
    durable.delete(manifest_key(FIRST), part_key(FIRST, 0, 1))
    assert recover(durable, []).cleared == ()
    for one in (SECOND, THIRD):
        durable.delete(manifest_key(one), part_key(one, 0, 1))
    assert recover(durable, []).cleared == (FIRST, SECOND, THIRD)
    assert keys(durable) == []


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("gone", [(FIRST,), (SECOND,), (FIRST, SECOND), (FIRST, SECOND, THIRD)])
def test_a_deletion_that_is_cut_off_anywhere_harms_no_other_checkpoint(
    chain: Chain, durable: DiskStore, tmp_path: Path, point: str, gone: tuple
) -> None:
    calls = 0
    has_died = True
    while has_died:
        copy = disk(tmp_path / f"copy-{calls}")
        shutil.copytree(durable.root, copy.root, dirs_exist_ok=True)
        dying = DyingStore(copy, calls, point)
        with contextlib.suppress(DiedError):
            delete(dying, *gone)
        has_died = dying.has_died
        for made in chain.made:
            if made.id not in gone:
                assert_reads(made, copy)
        # An opening finishes commits and removes remains; the deletion is then repeated.
        recover(copy, [])
        delete(copy, *(one for one in gone if one in list_checkpoints(copy)))
        needed = {IMAGE} if set(gone) != {FIRST, SECOND, THIRD} else set()
        left = {key for key in keys(copy) if any(f"/{one}/" in key for one in gone)}
        assert left == (needed if FIRST in gone else set())
        calls += 1
    assert calls > 3


def test_what_was_committed_after_the_listing_is_spared(chain: Chain, durable: DiskStore) -> None:
    images = ReusedImages()
    durable.delete(manifest_key(THIRD), manifest_key(SECOND), part_key(SECOND, 0, 1))
    listed = list_checkpoints(durable)
    # As if its part had been written by another host after the listing.
    del listed[THIRD]
    commit(durable, THIRD, 1, images.committing)
    remove_durable(durable, listed, [FIRST, SECOND], images=images)
    assert_reads(chain.made[2], durable)
    # Removed by another process, it is forgotten at the next listing.
    durable.delete(manifest_key(THIRD), part_key(THIRD, 0, 1))
    listed = images.list_checkpoints(durable)
    remove_durable(durable, listed, [FIRST, THIRD], images=images)
    assert keys(durable) == []


def test_a_commit_waits_while_images_are_removed(chain: Chain, durable: DiskStore) -> None:
    images = ReusedImages()
    durable.delete(manifest_key(THIRD))
    with ThreadPoolExecutor(1) as pool:
        with images.lock:
            job = pool.submit(commit, durable, THIRD, 1, images.committing)
            with pytest.raises(TimeoutError):
                job.result(0.2)
            durable.delete(IMAGE)
        with pytest.raises(CheckpointDamagedError, match="found no such image"):
            job.result(30)
    assert not list_checkpoints(durable)[THIRD].is_committed


def test_a_copy_of_a_run_is_whole(chain: Chain, durable: DiskStore, tmp_path: Path) -> None:
    delete(durable, FIRST)
    copied = disk(tmp_path / "copied")
    shutil.copytree(durable.root, copied.root, dirs_exist_ok=True)
    delete(durable, SECOND, THIRD)
    assert keys(durable) == []
    for made in chain.made[1:]:
        assert_reads(made, copied)


def test_a_checkpoint_that_is_copied_from_ram_restores_an_image_that_was_removed(
    memory: RamStore, durable: DiskStore
) -> None:
    made = Made(id=FIRST)
    made.add(BASE, random_array((5000,), "float32", 1))
    made.add(HEAD, random_array((100,), "float32", 2))
    chain = Chain()
    chain.begin(made, memory)
    chain.go_on(memory, [HEAD], 2)
    persist(memory, durable, made)
    delete(durable, FIRST)
    assert keys(durable) == []
    persist(memory, durable, chain.made[1])
    assert [key for key in keys(durable) if f"{FIRST}/" in key] == [IMAGE]
    assert_reads(chain.made[1], durable)
