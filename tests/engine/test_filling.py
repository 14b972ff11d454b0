"""A slot that is filled by one thread and sealed by another one behind it."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast.clock import SystemClock
from holdfast.engine import filling
from holdfast.engine.catalog import list_checkpoints
from holdfast.engine.filling import FillProgress, fill_slot, seal_slot
from holdfast.engine.save import PartPlan, all_anew, write_part
from holdfast.errors import StorageError
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.names import CheckpointId
from holdfast.format.records import ArraySpec, CheckpointSpec, PartRecord
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.engine.making import RUN_ID, TIME, random_array

ID = CheckpointId(4, 1)
SHAPES = {"big": (5, 1 << 20), "small": (7,), "none": (0, 3), "wide": (3, 700_001)}
ARRAYS = {
    name: random_array(shape, "float32", seed) for seed, (name, shape) in enumerate(SHAPES.items())
}


@pytest.fixture(params=[1, 4], ids=["one_thread", "four_threads"])
def thread_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(filling, "PARALLEL_SIZE_BYTES", 0)
    monkeypatch.setattr(filling, "PARALLEL_PIECE_BYTES", 0)
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


@pytest.mark.usefixtures("thread_count")
def test_a_slot_sealed_while_it_is_filled_is_what_a_store_would_have_been_given(
    plan: PartPlan, memory: RamStore, tmp_path: Path
) -> None:
    expected = write_part(DiskStore(tmp_path, SystemClock()), plan, chunk_bytes)
    steps = threading.Semaphore(0)
    asked: list[str] = []

    def one_by_one(chunk: Chunk) -> memoryview:
        asked.append(chunk.name)
        steps.acquire()
        return chunk_bytes(chunk)

    with (
        contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot,
        ThreadPoolExecutor(2) as pool,
    ):
        progress = FillProgress()
        sealing: Future[PartRecord | None] = pool.submit(
            seal_slot, memory, slot, plan, all_anew(plan), progress.wait_for
        )
        filled = pool.submit(fill_slot, slot, plan.layout, one_by_one, progress)
        for _ in range(3):
            assert not sealing.done()
            assert not list_checkpoints(memory)
            steps.release()
        filled.result(30)
        assert sealing.result(30) == expected
    assert asked == [c.name for c in plan.layout.chunks if c.size_bytes]
    with memory.open(f"checkpoints/{ID}/image-00000-of-00001.safetensors") as image:
        data = bytearray(image.size_bytes)
        image.read_into(0, memoryview(data))
    assert data == (tmp_path / f"checkpoints/{ID}/image-00000-of-00001.safetensors").read_bytes()


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_slot_whose_filling_ends_early_is_never_sealed(
    plan: PartPlan, memory: RamStore, blocks: int
) -> None:
    left = iter(range(blocks))

    def interrupted(chunk: Chunk) -> memoryview:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return chunk_bytes(chunk)

    with (
        contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot,
        ThreadPoolExecutor(1) as pool,
    ):
        progress = FillProgress()
        sealing = pool.submit(seal_slot, memory, slot, plan, all_anew(plan), progress.wait_for)
        with pytest.raises(KeyboardInterrupt):
            fill_slot(slot, plan.layout, interrupted, progress)
        progress.end()
        assert sealing.result(30) is None
    assert not list_checkpoints(memory)


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("failing_at", [0, 1, 5])
def test_a_thread_that_fails_ends_the_filling_and_is_told(
    plan: PartPlan, memory: RamStore, monkeypatch: pytest.MonkeyPatch, failing_at: int
) -> None:
    told: list[int] = []
    with contextlib.closing(memory.begin(plan.layout.size_bytes)) as slot:
        write, lock = slot.write, threading.Lock()

        def failing(offset_bytes: int, data: memoryview) -> None:
            with lock:
                told.append(offset_bytes)
                if len(told) == failing_at + 1:
                    raise StorageError("no more")
            write(offset_bytes, data)

        monkeypatch.setattr(slot, "write", failing)
        progress = FillProgress()
        with pytest.raises(StorageError, match="no more"):
            fill_slot(slot, plan.layout, chunk_bytes, progress)
        count = len(told)
        assert count <= failing_at + 1 + filling.THREAD_COUNT_MAX
        progress.end()
        assert not progress.wait_for(plan.layout.size_bytes)
    assert len(told) == count
