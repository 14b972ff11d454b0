"""A slot that is filled, and digested on the way, by one thread or several."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast.adapt.contract import Hold
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.saving import slots
from holdfast.engine.saving.part import ChunkBytes, PartPlan
from holdfast.engine.saving.part_writer import PartWriter, write_part
from holdfast.engine.saving.slots import CACHED_SIZE_BYTES, SlotFill, digests_of
from holdfast.errors import StorageError
from holdfast.format.digests import BLOCK_SIZE_BYTES
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.records import ArraySpec, CheckpointSpec
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore, SlotWriter
from tests.attempts import checkpoint_id
from tests.engine.making import RUN_ID, TIME, random_array

ID = checkpoint_id(4)
SHAPES = {"big": (5, 1 << 20), "small": (7,), "none": (0, 3), "wide": (3, 700_001)}
ARRAYS = {
    name: random_array(shape, "float32", seed) for seed, (name, shape) in enumerate(SHAPES.items())
}


@pytest.fixture(params=[1, 4], ids=["one_thread", "four_threads"])
def thread_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(slots, "PARALLEL_SIZE_BYTES", 0)
    monkeypatch.setattr(slots, "PARALLEL_PIECE_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(request.param)))
    return request.param


@pytest.fixture
def plan() -> PartPlan:
    specs = tuple(
        ArraySpec(
            path=(name,),
            shape=array.shape,
            dtype="float32",
            chunk_shape=array.shape,
            owners=((0, 1),),
        )
        for name, array in ARRAYS.items()
    )
    spec = CheckpointSpec(
        time=TIME, metrics=None, arrays=specs, containers=(), values=(), process_values=()
    )
    return PartPlan(
        run_id=RUN_ID,
        id=ID,
        rank=0,
        part_count=1,
        layout=image_layout(specs, 0),
        spec=spec,
        process_values=(),
    )


def chunk_bytes(chunk: Chunk) -> memoryview:
    array = list(ARRAYS.values())[chunk.array_index]
    return memoryview(array.reshape(-1).view(np.uint8))


class OnHost:
    """A snapshot of arrays in the host's memory."""

    on_devices: frozenset[int] = frozenset()
    marks = (None,) * len(ARRAYS)

    def __init__(self, chunk_bytes: ChunkBytes = chunk_bytes, hold: Hold = Hold.HOST) -> None:
        self.chunk_bytes = chunk_bytes
        self.hold = hold

    def copy_borrowed(self) -> None:
        self.hold = Hold.HOST


def fill_slot(
    slot: SlotWriter,
    plan: PartPlan,
    chunk_bytes: ChunkBytes = chunk_bytes,
    *,
    digesting: bool = True,
) -> SlotFill:
    fill = SlotFill(slot, plan.layout, SystemClock(), digesting=digesting)
    assert fill.copy(OnHost(chunk_bytes))
    return fill


@pytest.mark.usefixtures("thread_count")
def test_a_slot_is_what_a_store_would_have_been_given(
    plan: PartPlan, memory: RamStore, tmp_path: Path
) -> None:
    expected = write_part(DiskStore(tmp_path, SystemClock()), plan, chunk_bytes)
    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        part = PartWriter(memory, plan, OnHost(), None)
        fill = SlotFill(slot, plan.layout, SystemClock())
        assert part.open(fill)
        assert part.copy()
        assert not list_checkpoints(memory)
        assert fill.digests() == digests_of(slot, plan.layout, lambda stop_bytes: None)
        assert part.complete().record == expected
    with memory.open(f"checkpoints/{ID}/image-00000-of-00001.safetensors") as image:
        data = bytearray(image.size_bytes)
        image.read_into(0, memoryview(data))
    assert data == (tmp_path / f"checkpoints/{ID}/image-00000-of-00001.safetensors").read_bytes()


@pytest.mark.usefixtures("thread_count")
def test_a_copy_that_others_digest_is_not_digested_on_the_way(
    plan: PartPlan, memory: RamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RunningDigest", None)
    monkeypatch.setattr(slots, "digest", None)
    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        fill = fill_slot(slot, plan, digesting=False)
        monkeypatch.undo()
        assert fill.digests() == fill_slot(slot, plan).digests()


def test_what_is_digested_while_it_arrives_ends_where_no_more_comes(
    plan: PartPlan, memory: RamStore
) -> None:
    asked: list[int] = []

    def wait(stop_bytes: int) -> None:
        asked.append(stop_bytes)
        if len(asked) == 3:
            raise StorageError("no more comes")

    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        fill_slot(slot, plan, digesting=False)
        with pytest.raises(StorageError, match="no more comes"):
            digests_of(slot, plan.layout, wait)
        assert asked == sorted(asked)
        assert not [t for t in threading.enumerate() if t.name.startswith("holdfast-digest")]


def test_the_digests_are_those_of_what_stands_in_the_slot(
    plan: PartPlan, memory: RamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        right, write = fill_slot(slot, plan).digests(), slot.write
        bad_at = plan.layout.chunks[0].offset_bytes + CACHED_SIZE_BYTES

        def badly(offset_bytes: int, data: memoryview) -> None:
            bad = bytearray(data)
            bad[0] ^= offset_bytes == bad_at
            write(offset_bytes, memoryview(bad))

        monkeypatch.setattr(slot, "write", badly)
        found = fill_slot(slot, plan).digests()
        assert [a == b for a, b in zip(found, right, strict=True)] == [False] + [True] * 5


class Stopping:
    """A source whose first chunk is not there before `go_on` is set; it fails if it has to."""

    def __init__(self, *, fails: bool) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self._fails = fails

    def __call__(self, chunk: Chunk) -> memoryview:
        self.has_begun.set()
        assert self.go_on.wait(240)
        if self._fails:
            raise StorageError("the source fails")
        return chunk_bytes(chunk)


@pytest.mark.parametrize("is_whole", [True, False])
def test_one_thread_copies_and_the_others_wait_for_it(
    plan: PartPlan, memory: RamStore, is_whole: bool
) -> None:
    source = Stopping(fails=not is_whole)
    borrowed = OnHost(source, Hold.BORROWED)
    with (
        contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot,
        ThreadPoolExecutor(3) as pool,
    ):
        fill = SlotFill(slot, plan.layout, SystemClock())
        first = pool.submit(fill.copy, borrowed)
        assert source.has_begun.wait(240)
        others = [pool.submit(fill.copy, OnHost(Stopping(fails=True))), pool.submit(fill.end)]
        time.sleep(0.05)
        assert not any(other.done() for other in others)
        source.go_on.set()
        if is_whole:
            assert first.result(30)
        else:
            with pytest.raises(StorageError, match="the source fails"):
                first.result(30)
        assert others[0].result(30) is is_whole
        others[1].result(30)
        # A state that is borrowed is in the slot, or secured, before others go on.
        assert borrowed.hold is (Hold.BORROWED if is_whole else Hold.HOST)
        assert fill.is_whole is is_whole


def test_what_ended_before_it_began_is_copied_by_no_thread(
    plan: PartPlan, memory: RamStore
) -> None:
    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        fill = SlotFill(slot, plan.layout, SystemClock())
        fill.end()
        assert not fill.copy(OnHost(Stopping(fails=True)))


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_filling_that_is_interrupted_writes_no_more(
    plan: PartPlan, memory: RamStore, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    left, written = iter(range(blocks)), []

    def interrupted(chunk: Chunk) -> memoryview:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return chunk_bytes(chunk)

    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        write = slot.write

        def slowly(offset_bytes: int, data: memoryview) -> None:
            time.sleep(0.01)
            write(offset_bytes, data)
            written.append(offset_bytes)

        monkeypatch.setattr(slot, "write", slowly)
        with pytest.raises(KeyboardInterrupt):
            fill_slot(slot, plan, interrupted)
        count = len(written)
        time.sleep(0.1)
        assert len(written) == count


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("failing_at", [0, 1, 5])
def test_a_thread_that_fails_ends_the_filling_and_is_told(
    plan: PartPlan, memory: RamStore, monkeypatch: pytest.MonkeyPatch, failing_at: int
) -> None:
    written: list[int] = []
    pieces = 1 + slots.THREAD_COUNT_MAX * -(-BLOCK_SIZE_BYTES // CACHED_SIZE_BYTES)
    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        write, lock = slot.write, threading.Lock()

        def failing(offset_bytes: int, data: memoryview) -> None:
            with lock:
                written.append(offset_bytes)
                if len(written) == failing_at + 1:
                    raise StorageError("no more")
            write(offset_bytes, data)

        monkeypatch.setattr(slot, "write", failing)
        with pytest.raises(StorageError, match="no more"):
            fill_slot(slot, plan)
        count = len(written)
        assert count <= failing_at + pieces
    assert len(written) == count
