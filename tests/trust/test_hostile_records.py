"""Records that are sealed and lie: each case that a reader could be led astray by."""

from __future__ import annotations

import contextlib
import json
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.adapt.contract import EVERYTHING
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.reading.view import view_of
from holdfast.errors import CheckpointDamagedError, HoldfastError, NewerFormatError
from holdfast.format.check import CHUNK_COUNT_MAX, check_manifest
from holdfast.format.names import manifest_key
from holdfast.format.records import AttemptRecord, Manifest, PartRecord, RunRecord
from holdfast.format.sealed import record_digest, unseal
from holdfast.format.timeline import last_steps
from holdfast.format.values import decode_value, encode_value
from holdfast.store.contract import check_key
from holdfast.trainer.restore.restoring import LoneReader, Restorer
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import memory_folder
from tests.trust.damaged_run import (
    NEWEST,
    TIMELINE,
    DamagedRun,
    NestedFramework,
    right_state,
    same_tree,
)
from tests.trust.hostile_inputs import nested, sealed, sealed_json

MEMORY_MAX_BYTES = 64 * 1024 * 1024

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def shared() -> Iterator[DamagedRun]:
    with memory_folder() as root:
        run = DamagedRun(Path(root), 2)
        yield run
        run.close()


@pytest.fixture
def run(shared: DamagedRun) -> Iterator[DamagedRun]:
    """A run of two ranks; what a test writes over is put back."""
    yield shared
    for path, data in shared.pristine.items():
        if path.read_bytes() != data:
            path.write_bytes(data)


def file_of(run: DamagedRun, name: str) -> Path:
    is_manifest = name == MANIFEST
    return run.run / (manifest_key(NEWEST) if is_manifest else f"checkpoints/{NEWEST}/{name}")


MANIFEST, PART_0, PART_1 = (
    "manifest.json",
    "part-00000-of-00002.json",
    "part-00001-of-00002.json",
)


def tree_of(run: DamagedRun, name: str) -> Tree:
    tree = json.loads(file_of(run, name).read_bytes())
    del tree["digest"]
    return tree


def commit_lies(run: DamagedRun, lie: Callable[[Tree], None], *records: str) -> None:
    """Change records of the newest checkpoint, seal them again and commit them."""
    manifest = tree_of(run, MANIFEST)
    for rank, name in enumerate((PART_0, PART_1)):
        if name in records:
            part = tree_of(run, name)
            lie(part)
            data = sealed_json(part)
            file_of(run, name).write_bytes(data)
            manifest["parts"][rank]["record_digest"] = record_digest(data)
            manifest["parts"][rank]["image_size_bytes"] = part["image_size_bytes"]
    if MANIFEST in records:
        lie(manifest)
    file_of(run, MANIFEST).write_bytes(sealed_json(manifest))


def assert_refused_for(run: DamagedRun, *words: str) -> None:
    """The newest is refused, with little memory, and the one before it is restored."""
    rounds = LoneReader(rank=0, count=2, is_outside=False)
    durable = run.durable
    tracemalloc.start()
    try:
        found = Restorer(NestedFramework(), rounds, SystemClock()).newest(
            lambda: view_of([durable], durable), EVERYTHING
        )
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.id == TIMELINE[-2]
    assert same_tree(found.state, right_state(found.id, 0, False))
    ((step, attempt, reason),) = found.report.skipped
    assert (step, attempt) == (NEWEST.step, NEWEST.attempt.number)
    for word in words:
        assert word in reason
    assert peak_bytes < MEMORY_MAX_BYTES


def array_of(tree: Tree, index: int = 0) -> Tree:
    """An array's spec, in a manifest or in rank 0's record."""
    return tree["checkpoint"]["arrays"][index]


# Arrays.

BAD_CHUNKS: dict[str, Tree] = {
    "overlapping: more chunks than there are cells": {"owners": [[0, 2], [1, 1]]},
    "a gap: fewer chunks than there are cells": {"owners": [[0, 1]]},
    "a negative count": {"owners": [[0, 3], [1, -1]]},
    "a negative rank": {"owners": [[-1, 1], [1, 1]]},
    "a rank that there is not": {"owners": [[0, 1], [2, 1]]},
    "a chunk larger than the array": {"chunk_shape": [17, 12]},
    "a chunk without extent": {"chunk_shape": [0, 12]},
    "a negative extent": {"shape": [-16, 12]},
    "a negative chunk": {"chunk_shape": [-8, 12]},
    "an extent that overflows 64 bits": {"shape": [2**64, 12], "chunk_shape": [2**63, 12]},
    "a product that overflows 64 bits": {"shape": [2**40, 2**40], "chunk_shape": [2**40, 2**40]},
    "no bytes, and an extent that no library takes": {
        "shape": [2**62, 2**62, 0],
        "chunk_shape": [2**62, 2**62, 0],
        "owners": [[0, 1]],
    },
    "more axes than there may be": {"shape": [1] * 65, "chunk_shape": [1] * 65, "owners": [[0, 1]]},
    "chunks of fewer axes": {"chunk_shape": [8]},
    "another dtype of another size": {"dtype": "float64"},
    "an unknown dtype": {"dtype": "object"},
}


@pytest.mark.parametrize("changes", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_chunks_that_overlap_overflow_or_leave_a_gap_are_refused(
    run: DamagedRun, changes: Tree
) -> None:
    commit_lies(run, lambda tree: array_of(tree).update(changes), MANIFEST, PART_0)
    assert_refused_for(run)


def test_an_array_without_bytes_may_not_have_extents_that_no_library_takes(
    run: DamagedRun,
) -> None:
    shape = [2**62, 0, 2**62]
    changes = {"shape": shape, "chunk_shape": shape}
    commit_lies(run, lambda tree: array_of(tree, 2).update(changes), MANIFEST, PART_0)
    assert_refused_for(run, "is larger than")


def test_an_array_of_10_to_the_12_elements_is_refused_without_memory_for_it(
    run: DamagedRun,
) -> None:
    # All records agree: the size of the image, and a digest for each of its blocks.
    def lie(tree: Tree) -> None:
        size = 10**12
        array_of(tree).update(
            shape=[size], chunk_shape=[size], owners=[[0, 1]], dtype="uint8", path=["params", "w"]
        )
        if "image_size_bytes" in tree:
            blocks = -(-size // (8 << 20))
            tree["blocks"] = ["0" * 32] * (blocks + 3)
            tree["image_size_bytes"] += size

    commit_lies(run, lie, MANIFEST, PART_0)
    assert_refused_for(run, "image-00000-of-00002.safetensors", "are missing")


def test_a_claim_of_many_chunks_is_refused_before_they_are_laid_out(run: DamagedRun) -> None:
    def lie(tree: Tree) -> None:
        count = CHUNK_COUNT_MAX - 100
        array_of(tree).update(shape=[count], chunk_shape=[1], owners=[[0, count]])

    commit_lies(run, lie, MANIFEST, PART_0)
    assert_refused_for(run, "expected at least 1342176")


def test_more_chunks_than_a_checkpoint_may_have_are_refused(run: DamagedRun) -> None:
    def lie(tree: Tree) -> None:
        array_of(tree).update(shape=[10**12], chunk_shape=[1], owners=[[0, 10**12]], dtype="uint8")

    commit_lies(run, lie, MANIFEST, PART_0)
    assert_refused_for(run, "chunks, expected at most")


@pytest.mark.parametrize("count", [10**6, 10**6 + 1, 2**63, 10**100])
def test_a_part_that_claims_a_million_parts_and_more_is_refused(
    run: DamagedRun, count: int
) -> None:
    commit_lies(run, lambda tree: tree.update(part_count=count), PART_0)
    assert_refused_for(run, PART_0)


def test_a_manifest_of_many_parts_is_refused_for_the_first_that_is_not_there(
    run: DamagedRun,
) -> None:
    def lie(tree: Tree) -> None:
        tree["parts"] = [{"record_digest": "0" * 32, "image_size_bytes": 4096}] * 10**5

    commit_lies(run, lie, MANIFEST)
    rounds = LoneReader(rank=0, count=2, is_outside=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = Restorer(NestedFramework(), rounds, SystemClock()).newest(
        lambda: view_of([run.durable], run.durable), EVERYTHING
    )
    assert found is not None
    assert "no good copy of part 0 of 100000" in found.report.skipped[0][2]
    # The record itself has 7 MB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


# Paths.

TRAVERSALS: list[list[Any]] = [
    ["..", "..", "etc", "passwd"],
    ["../../../etc/passwd"],
    ["/etc/passwd"],
    ["params", "..", "w"],
    ["a\0b"],
    [".."],
    [""],
    [2**70],
]


@pytest.mark.parametrize("path", TRAVERSALS, ids=str)
def test_paths_of_arrays_that_look_like_files_touch_no_file(
    run: DamagedRun, path: list[Any]
) -> None:
    # A path is a place in the tree and never one on a disk: at most it does not fit into the tree.
    files = set(run.root.rglob("*"))
    parents = [path[:n] for n in range(1, len(path))]

    def lie(tree: Tree) -> None:
        array_of(tree, 2)["path"] = path
        tree["checkpoint"]["containers"] += [{"path": p, "kind": "dict"} for p in parents]

    commit_lies(run, lie, MANIFEST, PART_0)
    rounds = LoneReader(rank=0, count=2, is_outside=False)
    with contextlib.suppress(CheckpointDamagedError):
        Restorer(NestedFramework(), rounds, SystemClock()).newest(
            lambda: view_of([run.durable], run.durable), EVERYTHING
        )
    assert set(run.root.rglob("*")) == files


@pytest.mark.parametrize(
    "key", ["../x", "/etc/passwd", "a//b", "a/../b", "./a", "a/.b", "a\0b", "", ".", "a/", "a/./b"]
)
def test_no_key_leaves_the_folder_of_its_store(run: DamagedRun, key: str) -> None:
    for call in (
        check_key,
        run.durable.get,
        run.durable.delete,
        lambda k: run.durable.put(k, b""),
    ):
        with pytest.raises(HoldfastError):
            call(key)


def test_two_nodes_at_one_path_are_refused(run: DamagedRun) -> None:
    def twice(tree: Tree) -> None:
        tree["checkpoint"]["containers"].append({"path": ["params"], "kind": "list"})

    commit_lies(run, twice, MANIFEST, PART_0)
    assert_refused_for(run, "two nodes have the same path")


def test_a_part_with_other_values_than_the_checkpoint_has_objects_is_refused(
    run: DamagedRun,
) -> None:
    commit_lies(run, lambda tree: tree.update(values=[]), PART_1)
    assert_refused_for(run, "part 1 of 000000050.3", "rank 1 lacks data")


def test_a_manifest_of_another_state_than_its_parts_is_refused(run: DamagedRun) -> None:
    def lie(tree: Tree) -> None:
        tree["checkpoint"]["values"][0]["value"] = 12345

    commit_lies(run, lie, MANIFEST)
    assert_refused_for(run, "its checkpoint differs from")


def test_a_manifest_that_says_another_size_of_an_image_is_refused(run: DamagedRun) -> None:
    def lie(tree: Tree) -> None:
        tree["parts"][1]["image_size_bytes"] += 1

    commit_lies(run, lie, MANIFEST)
    assert_refused_for(run, PART_1, "the manifest has")


# JSON.


def _unsealed(run: DamagedRun, old: bytes, new: bytes, name: str = MANIFEST) -> Any:
    body = file_of(run, name).read_bytes()[:-46]
    assert old in body
    kind = Manifest if name == MANIFEST else PartRecord
    return unseal(sealed(body.replace(old, new, 1)), kind, name)


@pytest.mark.parametrize("depth", [500, 2_000, 100_000])
def test_deep_nesting_is_refused(run: DamagedRun, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for old, new in (
        (b'"value":353', b'"value":' + deep),
        (b'"attempt":[3,', b'"x":' + deep + b',"attempt":[3,'),
        (b'"run_id":"0', b'"run_id":' + b'{"a":' * depth + b"1" + b"}" * depth + b',"y":"0'),
    ):
        try:
            record = _unsealed(run, old, new)
            check_manifest(record, MANIFEST)
            decode_value(record.checkpoint.values[0].value)
        except CheckpointDamagedError:
            continue
        # A member that a reader does not know it need not look into.
        assert depth == 500
        assert b'"x":' in new


def test_deep_values_are_refused_from_the_101st_level_on() -> None:
    assert decode_value(nested(99, 1)) == nested(99, 1)
    for way in (lambda v: [v], lambda v: {"tuple": [v]}, lambda v: {"dict": [["k", v]]}):
        value: Any = 1
        for _ in range(102):
            value = way(value)
        with pytest.raises(CheckpointDamagedError, match="deeper than 100"):
            decode_value(value)


def test_a_damaged_value_is_told_however_deep_it_is_nested() -> None:
    with pytest.raises(CheckpointDamagedError, match="no such kind"):
        decode_value({"x": nested(2000, 1)})


def test_of_a_member_that_stands_twice_the_last_counts_for_every_reader(run: DamagedRun) -> None:
    body = file_of(run, MANIFEST).read_bytes()[:-46]
    for changed in (
        body.replace(b'"step":50', b'"step":7,"step":50'),
        body.replace(b'"step":50', b'"step":50,"step":7'),
        body.replace(b'"value":353', b'"value":{"int":"0x1","int":"0x2"}'),
    ):
        record = unseal(sealed(changed), Manifest, "m")
        plain = json.loads(changed + b"}")
        assert record.step == plain["step"]
        value = plain["checkpoint"]["values"][0]["value"]
        assert record.checkpoint.values[0].value == value
    assert decode_value(value) == 2
    newer = body.replace(b'"format_version":1', b'"format_version":1,"format_version":2')
    with pytest.raises(NewerFormatError):
        unseal(sealed(newer), Manifest, "m")


def test_a_dict_with_one_key_twice_is_refused() -> None:
    for pairs in ([[1, "a"], [1, "b"]], [[1, "a"], [True, "b"]], [["k", 1], ["k", 1]]):
        with pytest.raises(CheckpointDamagedError, match="equal"):
            decode_value({"dict": pairs})


@pytest.mark.parametrize("token", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"+1"])
def test_numbers_that_json_does_not_have_are_refused(run: DamagedRun, token: bytes) -> None:
    for old in (b'"value":353', b'"loss":0.02', b'"step":50', b'"run_id":"0"'):
        name = old.partition(b":")[0]
        if old == b'"run_id":"0"':
            old, new = b'"run_id"', b'"x":' + token + b',"run_id"'
        else:
            new = name + b":" + token
        if token.lstrip(b"-") == b"1e999" and b'"x":' in new:
            continue
        with pytest.raises(CheckpointDamagedError):
            _unsealed(run, old, new)


def test_huge_ints_are_read_or_refused(run: DamagedRun) -> None:
    for digits in (20, 100, 4000, 5000, 100_000):
        for old in (b'"step":50', b'"value":353', b'"format_version":1', b'"image_size_bytes":4'):
            new = old.partition(b":")[0] + b":" + b"9" * digits
            with contextlib.suppress(HoldfastError):
                record = _unsealed(run, old, new)
                check_manifest(record, MANIFEST)
                str(record)


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\xc0\x80", b"\xf5"])
def test_text_that_is_no_unicode_is_refused_wherever_it_stands(
    run: DamagedRun, text: bytes
) -> None:
    for old, new in (
        (b'"run_id":"0', b'"run_id":"' + text + b"0"),
        (b'"value":353', b'"value":"' + text + b'"'),
        (b'"run_id"', b'"unknown":"' + text + b'","run_id"'),
        (b'"params"', b'"' + text + b'"'),
    ):
        with pytest.raises(CheckpointDamagedError):
            _unsealed(run, old, new)


@pytest.mark.parametrize("time", ["2026-08-01T12:00:00", "2026-08-01", "now", 1, None])
def test_a_time_without_a_zone_is_refused(run: DamagedRun, time: object) -> None:
    tree = tree_of(run, MANIFEST)
    tree["checkpoint"]["time"] = time
    with pytest.raises(CheckpointDamagedError):
        unseal(sealed_json(tree), Manifest, MANIFEST)


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x", "/tmp/x", "a/b", "a\0", "a\n", "a" * 65])
def test_a_run_id_that_could_lead_out_of_the_hosts_folder_is_refused(
    run: DamagedRun, run_id: str
) -> None:
    # The agent's folder in memory is named by it.
    for name, kind in (("holdfast.json", RunRecord), ("attempts/000000003.json", AttemptRecord)):
        tree = json.loads((run.run / name).read_bytes())
        del tree["digest"]
        with pytest.raises(CheckpointDamagedError, match="run_id"):
            unseal(sealed_json({**tree, "run_id": run_id}), kind, name)


@pytest.mark.parametrize("version", [0, -1])
def test_a_format_version_that_never_was_is_damage(run: DamagedRun, version: int) -> None:
    with pytest.raises(CheckpointDamagedError, match="invalid format version"):
        _unsealed(run, b'"format_version":1', b'"format_version":%d' % version)


def test_a_dict_with_huge_keys_can_be_saved_and_read() -> None:
    value = {10**5000: 1, (10**5000, 2): {"a": [3]}}
    assert decode_value(msgspec.json.decode(msgspec.json.encode(encode_value(value, "v")))) == value


# Attempts.


def _put_origin(run: DamagedRun, origin: tuple[int, int]) -> None:
    """Give attempt 3 and its copy another origin, under a right digest."""
    for name in ("000000003.json", "000000003.copy.json"):
        path = run.run / "attempts" / name
        tree = json.loads(path.read_bytes())
        del tree["digest"]
        step, number = origin
        path.write_bytes(sealed_json({**tree, "origin": [step, [number, "00000003"]]}))


@pytest.mark.parametrize("origin", [(20, 3), (20, 4)])
def test_an_attempt_that_came_from_nowhere_ends_the_timeline(
    run: DamagedRun, origin: tuple[int, int]
) -> None:
    _put_origin(run, origin)
    view = view_of([run.durable], run.durable)
    assert view.timeline[-2:] == tuple(TIMELINE[-2:])


@pytest.mark.parametrize("origin", [(20, 10**9), (20, -1), (-5, 1), (10**100, 2), (20, 10**100)])
def test_an_attempt_that_came_from_an_impossible_one_is_refused_by_name(
    run: DamagedRun, origin: tuple[int, int]
) -> None:
    _put_origin(run, origin)
    with pytest.raises(CheckpointDamagedError, match=r"attempts/000000003\.json"):
        view_of([run.durable], run.durable)


def test_a_loop_of_attempts_ends(run: DamagedRun) -> None:
    record = msgspec.json.decode(
        (run.run / "attempts/000000003.json").read_bytes(), type=AttemptRecord
    )
    loop = {
        n: msgspec.structs.replace(
            record, attempt=attempt_id(n), origin=checkpoint_id(1, n % 3 + 1)
        )
        for n in (1, 2, 3)
    }
    assert set(last_steps(loop)) == {attempt_id(1), attempt_id(3)}
    assert set(read_attempts(run.durable)) == {1, 2, 3}
