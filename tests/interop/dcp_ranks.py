"""One rank of several that use torch.distributed.checkpoint: TASK FOLDER RANK COUNT."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.interop.dcp import HoldfastReader, HoldfastWriter

ROWS = torch.arange(20.0).reshape(5, 4)
COLUMNS = torch.arange(12.0).reshape(4, 3)


class OneRankFails(dcp.DefaultSavePlanner):  # type: ignore[misc]
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1 has no such data")
        return super().resolve_data(write_item)


def sharded(count: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (count,))
    return {
        "rows": distribute_tensor(ROWS.clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(COLUMNS.clone(), mesh, [Shard(1)]),
        "copies": distribute_tensor(torch.ones(4), mesh, [Replicate()]),
        "plain": torch.full((2,), 3.0),
        "epoch": 4,
    }


def raised(call: Any) -> str:
    """Return the message of the CheckpointException that a call raises on every rank."""
    with pytest.raises(dcp.CheckpointException) as caught:
        call()
    return str(caught.value)


def save(folder: Path, count: int) -> None:
    state, writer = sharded(count), HoldfastWriter(folder / "failed")
    said = raised(lambda: dcp.save(state, storage_writer=writer, planner=OneRankFails()))
    assert "rank 1 has no such data" in said
    reader = HoldfastReader(folder / "failed")
    said = raised(lambda: dcp.load({"rows": torch.zeros(5, 4)}, storage_reader=reader))
    assert "expected a run" in said
    dcp.save(state, checkpoint_id=folder / "one", storage_writer=writer)
    load(folder, count)


def load(folder: Path, count: int) -> None:
    mesh = init_device_mesh("cpu", (count,))
    state: dict[str, Any] = {
        "rows": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros(4, 3).double(), mesh, [Shard(0)]),
        "epoch": 0,
    }
    dcp.load(state, storage_reader=HoldfastReader(folder / "one"))
    rows, columns = state["rows"], state["columns"]
    assert isinstance(rows, DTensor)
    assert isinstance(columns, DTensor)
    assert torch.equal(rows.full_tensor(), ROWS)
    assert torch.equal(columns.full_tensor(), COLUMNS.double())
    assert state["epoch"] == 4


def process(folder: Path, count: int) -> None:
    writer = HoldfastWriter(folder / "process")
    for _ in range(2):
        done = dcp.async_save(
            sharded(count),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        done.result(timeout=90)


def group(folder: Path, count: int) -> None:
    some = dist.new_group([1, 2])
    if dist.get_rank():
        state = {"w": torch.full((3,), 7.0), "rank": dist.get_rank()}
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        writer = HoldfastWriter(folder / "group")
        dcp.save(state, storage_writer=writer, process_group=some, planner=planner)


def main() -> None:
    warnings.simplefilter("ignore")
    task, folder, rank, count = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/ranks-{task}",
        rank=int(rank),
        world_size=int(count),
    )
    {"save": save, "load": load, "process": process, "group": group}[task](Path(folder), int(count))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
