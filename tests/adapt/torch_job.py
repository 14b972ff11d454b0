"""One process of a job of PyTorch: save DTensors of an FSDP2 module, or restore those of before."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast

ROWS = torch.arange(30.0).reshape(10, 3)


def main(run: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first, other = state(mesh, 1), state(mesh, 2)
    first["model"](torch.ones(2, 6)).sum().backward()
    first["optimizer"].step()
    with holdfast.CheckpointManager(run) as manager:
        start, _ = manager.resume(other)
        if start == 0:
            assert manager.save(0, first, force=True)
            manager.wait_until_finished()
            manager.restore(0, like=other)
        else:
            # Three processes go on where two have stopped: with the plan, and new random numbers.
            assert other["order"].get_state() == first["order"].get_state()
            numbers = [None] * dist.get_world_size()
            dist.all_gather_object(numbers, torch.rand(1).item())
            assert len(set(numbers)) == dist.get_world_size() == 3
        for name in ("rows", "columns", "copies"):
            assert torch.equal(other[name].full_tensor(), ROWS)
        for one, of in zip(moments(first), moments(other), strict=True):
            assert torch.equal(one.full_tensor(), of.full_tensor())
    print(f"resumed at {start}", flush=True)
    dist.destroy_process_group()


def state(mesh: object, factor: int) -> dict:
    torch.manual_seed(factor)
    model = torch.nn.Linear(6, 5)
    fully_shard(model, mesh=mesh)
    placements = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    order = holdfast.data.Order(50, batch=8)
    if factor == 1:
        order.skip(1, steps=3)
    return {
        "order": order,
        "random": holdfast.torch.RandomState(per_rank=True),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        **{n: distribute_tensor(ROWS * factor, mesh, [p]) for n, p in placements.items()},
    }


def moments(of: dict) -> list:
    every = [t for each in of["optimizer"].state.values() for t in (each["exp_avg"],)]
    return [*of["model"].parameters(), *every]


if __name__ == "__main__":
    main(sys.argv[1])
