"""A full tmpfs is an ordinary error: what could end in a SIGBUS runs in a process of its own."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import OutOfSpaceError, StorageError
from holdfast.store.slots import SlotPool
from tests.store.places import mounted, open_ram

MIB = 1 << 20


def pool_in(root: Path) -> SlotPool:
    return SlotPool(root, None, SystemClock())


def _in_process(work, *arguments: object) -> str:
    """What `work(*arguments)` returned in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        return ours.recv()
    except EOFError:
        process.join(60)
        pytest.fail(f"the process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        ours.close()


def _answer(pipe, work, *arguments: object) -> None:
    pipe.send(work(*arguments))


def _overfill(root: Path, sizes: list[int]) -> str:
    store = open_ram(root)
    outcomes = []
    for number, size in enumerate(sizes):
        try:
            store.put(f"i/{number}.safetensors", bytes(size))
            outcomes.append("whole")
        except StorageError as error:
            outcomes.append(type(error).__name__)
    return " ".join(outcomes)


def test_a_full_tmpfs_is_an_error_and_not_a_sigbus(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=4m") as folder:
        outcomes = _in_process(_overfill, folder / "ram", [8 * MIB, 3 * MIB, 3 * MIB, 100])
        assert outcomes == "OutOfSpaceError whole OutOfSpaceError whole"
        store = open_ram(folder / "ram")
        listed = [(s.key, s.size_bytes) for s in store.list("i")]
        assert listed == [("i/1.safetensors", 3 * MIB), ("i/3.safetensors", 100)]
        assert [*pool_in(folder / "ram").free_slots()] == []


def _overfill_records(root: Path) -> str:
    store = open_ram(root)
    store.put("a/old", b"whole")
    outcomes = []
    for call in (
        lambda: store.put("a/old", bytes(8 * MIB)),
        lambda: store.put_if_absent("a/new", bytes(8 * MIB)),
    ):
        try:
            call()
        except StorageError as error:
            outcomes.append(type(error).__name__)
    return " ".join([*outcomes, store.get("a/old").decode()])


def test_a_record_on_a_full_tmpfs_is_an_error_and_leaves_the_old_one(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=4m") as folder:
        outcomes = _in_process(_overfill_records, folder / "ram")
        assert outcomes == "OutOfSpaceError OutOfSpaceError whole"


def test_a_reservation_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=4m") as folder:
        pool = pool_in(folder / "ram")
        with pytest.raises(OutOfSpaceError):
            pool.reserve(8 * MIB)
        assert [*pool.free_slots()] == []
        assert len(pool.reserve(3 * MIB)) > 0
