"""One rank of several that use torch.distributed.checkpoint: TASK FOLDER RANK COUNT."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from holdfast.interop.dcp import HoldfastReader, HoldfastWriter, async_save

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
    # DCP before 2.12 leaves out the reason.
    assert "expected a run" in said or "metadata is None" in said
    # The coordinator alone finds that something else is at the path.
    mine = folder / "mine"
    if dist.get_rank() == 0:
        mine.mkdir()
        (mine / "notes").touch()
    said = raised(lambda: dcp.save(state, checkpoint_id=mine, storage_writer=writer))
    assert "which is not overwritten" in said
    if dist.get_rank() == 0:
        (mine / "notes").unlink()
        mine.rmdir()
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


class Killed(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Ends the process of one rank in the middle of its write."""

    def __init__(self, victim: int) -> None:
        super().__init__()
        self.victim = victim

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def killed(folder: Path, count: int, victim: int) -> None:
    writer = HoldfastWriter(folder / "two")
    with pytest.raises((dcp.CheckpointException, RuntimeError)):
        dcp.save(sharded(count), storage_writer=writer, planner=Killed(victim))
    # The group is of no use any more.
    os._exit(0)


def again(folder: Path, count: int) -> None:
    state = sharded(count)
    state["rows"] = state["rows"] * 2
    dcp.save(state, storage_writer=HoldfastWriter(folder / "two"))


def strided(folder: Path, count: int) -> None:
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("fsdp", "tp"))
    line = init_device_mesh("cpu", (count,))
    few = torch.arange(6.0).reshape(2, 3)
    model, blank = (torch.nn.Linear(2, 10, bias=False) for _ in range(2))
    for each in (model, blank):
        # Both cut the rows: into 3, 2, 3 and 2.
        parallelize_module(each, mesh["tp"], ColwiseParallel())
        fully_shard(each, mesh=mesh["fsdp"])
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        model.weight.to_local().uniform_()
    state = {
        "w": model.state_dict()["weight"],
        "few": distribute_tensor(few.clone(), line, [Shard(0)]),
        "whole": model.weight.full_tensor().detach(),
    }
    dcp.save(state, storage_writer=HoldfastWriter(folder / "strided"))
    wanted = {
        "w": blank.state_dict()["weight"],
        "few": distribute_tensor(torch.zeros(2, 3), line, [Replicate()]),
    }
    dcp.load(wanted, storage_reader=HoldfastReader(folder / "strided"))
    assert torch.equal(blank.weight.to_local(), model.weight.to_local())
    assert torch.equal(wanted["few"].full_tensor(), few)


def process(folder: Path, count: int) -> None:
    writer = HoldfastWriter(folder / "process")
    for planner in (None, OneRankFails(), None):
        done = dcp.async_save(
            sharded(count),
            storage_writer=writer,
            planner=planner,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        if planner is None:
            done.result(timeout=240)
        else:
            assert "rank 1 has no such data" in raised(lambda done=done: done.result(timeout=240))


def training(folder: Path, count: int, saves: Any = async_save) -> None:
    """Save twice in the background, while the training uses the default group."""
    writer = HoldfastWriter(folder / "training")
    for number in range(2):
        state = {"w": torch.full((3,), 7.0 + number), "rank": dist.get_rank()}
        saved = saves(state, storage_writer=writer)
        step = 0
        while True:
            step += 1
            # The ranks agree on the end, which each sees at another step.
            reduced = torch.tensor([float(step), float(saved.done())])
            dist.all_reduce(reduced)
            assert reduced[0] == step * count
            if reduced[1] == count:
                break
        saved.result(timeout=240)
        state["w"].zero_()
        dcp.load(state, storage_reader=HoldfastReader(folder / "training"))
        assert torch.equal(state["w"], torch.full((3,), 7.0 + number))


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
    task, _, victim = task.partition("-")
    tasks: dict[str, Any] = {
        "save": save,
        "load": load,
        "again": again,
        "strided": strided,
        "process": process,
        "group": group,
        "training": training,
        "shared": partial(training, saves=dcp.async_save),
        "killed": partial(killed, victim=int(victim or 0)),
    }
    tasks[task](Path(folder), int(count))
    dist.destroy_process_group()
    # Tracebacks and meshes keep the group alive. While the interpreter is finalized, a thread of
    # Gloo may still release the tensors of the last collective, and then aborts the process
    # (pytorch/pytorch, pull request 179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
