"""The commit: all parts, then the manifest, once; and nothing of a fenced attempt."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import xxhash

from holdfast.engine.lifecycle.catalog import Listing, list_checkpoints
from holdfast.engine.lifecycle.commit import check_not_fenced, commit, remove
from holdfast.engine.lifecycle.recovery import recover
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.saving.part_writer import write_part
from holdfast.errors import CheckpointDamagedError, FencedError, ObjectNotFoundError, StorageError
from holdfast.format.names import AttemptId, CheckpointId, checkpoint_folder, manifest_key, part_key
from holdfast.format.records import SavedValue
from holdfast.store.disk import DiskStore
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import Made, begin, disk, flip_bit, random_array, sources_of
from tests.engine.stores import POINTS, DiedError, DyingStore
from tests.engine.test_restore import assert_filled, whole_targets

RANKS = 2


def made_at(step: int, attempt: int = 1, part_count: int = RANKS) -> Made:
    made = Made(id=checkpoint_id(step, attempt), part_count=part_count)
    owners = tuple((rank, 1) for rank in range(part_count))
    made.add(("w",), random_array((part_count, 5), "float32", step), (1, 5), owners)
    return made


def assert_restorable(store: DiskStore, made: Made) -> None:
    targets = whole_targets(made)
    fill_targets(sources_of(made.id, store), targets)
    assert_filled(made, targets)


def objects(store: DiskStore, made: Made) -> list[str]:
    return [s.key for s in store.list(checkpoint_folder(made.id))]


def hidden_files(root: Path) -> list[Path]:
    return [p for p in root.rglob(".*") if p.is_file()]


def test_a_manifest_is_the_digests_of_its_part_records(durable: DiskStore) -> None:
    made = made_at(10)
    made.save(durable)
    manifest = json.loads(durable.get(manifest_key(made.id)))
    for rank, reference in enumerate(manifest["parts"]):
        record = durable.get(part_key(made.id, rank, RANKS))
        assert reference["record_digest"] == xxhash.xxh3_128_hexdigest(record)
        part = json.loads(record)
        assert reference["image_size_bytes"] == part["image_size_bytes"]
        image = durable.root / part_key(made.id, rank, RANKS).replace("part-", "image-").replace(
            "json", "safetensors"
        )
        assert part["image_size_bytes"] == image.stat().st_size
        assert part["header_digest"] == xxhash.xxh3_128_hexdigest(image.read_bytes()[:4096])
        assert part["blocks"] == [xxhash.xxh3_128_hexdigest(image.read_bytes()[4096:])]
    assert (
        manifest["checkpoint"] == json.loads(durable.get(part_key(made.id, 0, RANKS)))["checkpoint"]
    )


@pytest.mark.parametrize(
    "there", [s for n in range(3) for s in itertools.combinations(range(3), n)], ids=str
)
def test_a_manifest_is_written_only_when_all_parts_are_there(
    durable: DiskStore, there: tuple[int, ...]
) -> None:
    made = made_at(10, part_count=3)
    made.write(durable, there)
    with pytest.raises(ObjectNotFoundError):
        commit(durable, made.id, 3)
    assert manifest_key(made.id) not in objects(durable, made)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_damaged_part_record_is_not_committed(durable: DiskStore, rank: int) -> None:
    made = made_at(10)
    made.write(durable)
    flip_bit(durable.root / part_key(made.id, rank, RANKS), 300)
    with pytest.raises(CheckpointDamagedError, match=f"part-0000{rank}"):
        commit(durable, made.id, RANKS)
    assert manifest_key(made.id) not in objects(durable, made)


def test_a_part_record_of_another_checkpoint_is_not_committed(durable: DiskStore) -> None:
    made, other = made_at(10), made_at(20)
    made.write(durable)
    other.write(durable)
    data = durable.get(part_key(other.id, 1, RANKS))
    durable.put(part_key(made.id, 1, RANKS), data)
    with pytest.raises(CheckpointDamagedError, match=r"part 1 of 2 of 000000020\.1-00000001"):
        commit(durable, made.id, RANKS)
    assert manifest_key(made.id) not in objects(durable, made)


@pytest.mark.parametrize(
    ("paths", "difference"),
    [
        ([("data",), ("rng",)], None),
        ([("rng",)], "rank 1 lacks data;"),
        ([("data",), ("rng",), ("loaders", "eval")], "rank 1 has besides loaders/eval;"),
        ([("other",)], "rank 1 lacks data, rng and has besides other;"),
        ([("data",), ("data",), ("rng",)], "rank 1 has one twice;"),
    ],
)
def test_states_of_different_objects_are_not_committed(
    durable: DiskStore, paths: list[tuple[str, ...]], difference: str | None
) -> None:
    made = made_at(10)
    saved = [("data",), ("rng",)]
    for rank, own in ((0, saved), (1, paths)):
        plan = made.plan(rank)
        spec = msgspec.structs.replace(plan.spec, process_values=tuple(own))
        values = tuple(SavedValue(path=path, value=rank) for path in own)
        write_part(durable, replace(plan, spec=spec, process_values=values), made.chunk_bytes)
    if difference is None:
        commit(durable, made.id, RANKS)
        return
    with pytest.raises(CheckpointDamagedError, match=difference):
        commit(durable, made.id, RANKS)
    assert manifest_key(made.id) not in objects(durable, made)


def test_the_first_commit_stays_whoever_commits_again(durable: DiskStore) -> None:
    made = made_at(10)
    made.write(durable)
    barrier = threading.Barrier(4, timeout=240)

    def race() -> None:
        barrier.wait()
        commit(durable, made.id, RANKS)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = durable.get(manifest_key(made.id))
    commit(durable, made.id, RANKS)
    assert durable.get(manifest_key(made.id)) == first
    assert_restorable(durable, made)


# Interrupted anywhere, and opened again. Without an interruption a save changes five objects: the
# image and the record of each of two ranks, and the manifest.

CHANGES_OF_A_SAVE = 2 * RANKS + 1


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("calls", range(CHANGES_OF_A_SAVE))
def test_an_interrupted_save_is_finished_or_cleared(root: Path, calls: int, point: str) -> None:
    store = disk(root / "run")
    begin(store, None)
    before, made = made_at(10), made_at(20)
    before.save(store)
    with pytest.raises(DiedError):
        made.save(DyingStore(store, calls, point))
    opened = disk(root / "run")
    found = recover(opened, ())
    # Midway through the manifest is after it: the call is done and has not returned.
    done = calls + (point == "after" or (point == "midway" and calls == CHANGES_OF_A_SAVE - 1))
    if done >= CHANGES_OF_A_SAVE - 1:
        is_new = done == CHANGES_OF_A_SAVE - 1
        assert found.committed == ((made.id,) if is_new else ())
        assert found.cleared == ()
        assert_restorable(opened, made)
    else:
        assert found.committed == ()
        assert found.cleared == ((made.id,) if done else ())
        assert objects(opened, made) == []
    assert_restorable(opened, before)
    assert hidden_files(root) == []
    again = recover(disk(root / "run"), ())
    assert (again.committed, again.cleared) == ((), ())


def test_the_table_of_interruptions_is_whole(durable: DiskStore) -> None:
    made_at(20).save(DyingStore(durable, CHANGES_OF_A_SAVE, "before"))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("calls", range(2 * RANKS + 3))
def test_an_interrupted_removal_leaves_a_whole_checkpoint_or_none(
    root: Path, calls: int, point: str
) -> None:
    store = disk(root / "run")
    begin(store, None)
    kept, made = made_at(10), made_at(20)
    for one in (kept, made):
        one.save(store)
    listing = list_checkpoints(store)[made.id]
    with pytest.raises(DiedError):
        remove(DyingStore(store, calls, point), made.id, listing)
    opened = disk(root / "run")
    for is_recovered in (False, True):
        if is_recovered:
            recover(opened, ())
        listed = list_checkpoints(opened).get(made.id, Listing())
        records = [name for name in listed.sizes_bytes if name.startswith("part-")]
        assert len(records) == len(listed.parts), "a part record without its image"
        if listed.is_committed:
            assert_restorable(opened, made)
        elif is_recovered:
            assert objects(opened, made) == []
        assert_restorable(opened, kept)
    remove(opened, made.id, listing)
    assert objects(opened, made) == []


@pytest.mark.parametrize("point", POINTS)
def test_an_interrupted_recovery_is_finished_by_the_next(root: Path, point: str) -> None:
    for calls in itertools.count():
        store = disk(root / f"run{calls}")
        begin(store, None)
        whole, torn = made_at(20), made_at(30)
        whole.write(store)
        torn.write(store, [0])
        dying = DyingStore(store, calls, point)
        with contextlib.suppress(DiedError):
            recover(dying, ())
        recover(disk(store.root), ())
        assert_restorable(store, whole)
        assert objects(store, torn) == []
        if not dying.has_died:
            break
    assert calls >= 5


def test_recovery_clears_what_killed_writes_left(durable: DiskStore) -> None:
    begin(durable, None)
    made = made_at(10)
    made.save(durable)
    for name in (
        "000000010.1-00000001/.part-00000-of-00001.json.0123.unfinished",
        "000000020.1-00000001/.part-00000-of-00001.json.0123.unfinished",
        "manifests/.0999999999999980-000000020.1-00000001.json.0123.unfinished",
    ):
        left = durable.root / "checkpoints" / name
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(b"torn")
    recover(durable, ())
    assert hidden_files(durable.root) == []
    assert_restorable(durable, made)


def test_what_is_in_care_is_left_alone(durable: DiskStore) -> None:
    begin(durable, None)
    whole, torn = made_at(20), made_at(30)
    whole.write(durable)
    torn.write(durable, [1])
    found = recover(durable, [whole.id, torn.id])
    assert (found.committed, found.cleared) == ((), ())
    assert len(objects(durable, whole)) == 4
    assert len(objects(durable, torn)) == 2


def test_where_an_attempt_works_only_what_came_before_it_is_recovered(durable: DiskStore) -> None:
    begin(durable, None, (20, 1))
    whole, torn, present = made_at(20), made_at(10), made_at(30, 2)
    whole.write(durable)
    torn.write(durable, [1])
    present.write(durable, [0])
    written = durable.root / checkpoint_folder(present.id) / ".image.0123.unfinished"
    written.write_bytes(b"half of it")
    found = recover(durable, (), attempt=attempt_id(2))
    assert (found.committed, found.cleared) == ((whole.id,), (torn.id,))
    assert len(objects(durable, present)) == 2
    assert hidden_files(durable.root) == [written]


@pytest.mark.parametrize("token", ["0" * 8, "f" * 8])
def test_what_an_attempt_with_the_number_of_the_present_one_left_is_cleared_whatever_its_token(
    durable: DiskStore, token: str
) -> None:
    begin(durable, None, (20, 1))
    lost, present = made_at(30, 2), made_at(31, 2)
    lost.id = CheckpointId(30, AttemptId(2, token))
    lost.write(durable)
    present.write(durable, [0])
    found = recover(durable, (), attempt=present.id.attempt)
    assert (found.committed, found.cleared) == ((), (lost.id,))
    assert len(objects(durable, present)) == 2


def test_a_checkpoint_with_a_damaged_part_is_cleared(durable: DiskStore) -> None:
    begin(durable, None)
    made = made_at(20)
    made.write(durable)
    flip_bit(durable.root / part_key(made.id, 1, RANKS), 300)
    assert recover(durable, ()).cleared == (made.id,)
    assert objects(durable, made) == []


# (origins of attempts 1, 2, …; the checkpoint; whether it may be committed)
FENCES = {
    "the present attempt": ([None], (10, 1), True),
    "another went on from later": ([None, (20, 1)], (10, 1), True),
    "another went on from it": ([None, (10, 1)], (10, 1), True),
    "another went on from earlier": ([None, (9, 1)], (10, 1), False),
    "another started over": ([None, None], (10, 1), False),
    "one after the other went back": ([None, (10, 1), (8, 1)], (10, 1), False),
    "another went back on another branch": ([None, (10, 1), (15, 2), (12, 2)], (10, 1), True),
    "the newest of several": ([None, (10, 1), (15, 2)], (16, 3), True),
    "an older one of several": ([None, (10, 1), (15, 2)], (16, 2), False),
    "an attempt that never began": ([None], (10, 2), False),
}


@pytest.mark.parametrize(("origins", "checkpoint", "may"), FENCES.values(), ids=FENCES)
def test_what_a_newer_attempt_left_behind_is_not_committed(
    durable: DiskStore, origins: list, checkpoint: tuple[int, int], may: bool
) -> None:
    begin(durable, *origins)
    made = made_at(*checkpoint)
    made.write(durable)
    if may:
        check_not_fenced(durable, made.id)
    else:
        has_begun = made.id.attempt.number <= len(origins)
        problem = FencedError if has_begun else StorageError
        with pytest.raises(problem, match=r"stop its processes|put back .* nothing more"):
            check_not_fenced(durable, made.id)
    found = recover(durable, ())
    assert found.committed == ((made.id,) if may else ())
    # An attempt that is not listed may have begun since.
    stays = may or made.id.attempt.number > len(origins)
    assert found.cleared == (() if stays else (made.id,))
    assert bool(objects(durable, made)) == stays


def test_a_committed_checkpoint_of_a_fenced_attempt_is_kept(durable: DiskStore) -> None:
    begin(durable, None)
    made = made_at(10)
    made.save(durable)
    begin(durable, (5, 1))
    found = recover(durable, ())
    assert (found.committed, found.cleared) == ((), ())
    assert_restorable(durable, made)
