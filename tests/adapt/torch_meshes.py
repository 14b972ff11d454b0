"""Jobs of PyTorch over meshes of processes: one model that FSDP2 and tensor parallelism divide.

Arguments: a directory, and the jobs as JSON: [[process count, [layout, ...]], ...]. Each job first
restores every checkpoint of the earlier jobs and then every one of its own, into each of its
layouts, and compares all elements and moments with what the saving ranks gathered. Importing
PyTorch takes seconds, so this process imports it and forks the ranks.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast import preservation_policy, save_decision_policy

BY_TENSOR_PARALLELISM = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


class Net(torch.nn.Module):
    """Ten rows, which two meshes of two cut into 3, 2, 3, 2; and one row, for some ranks none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 3)
        self.head = torch.nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        return self.head(self.down(self.up(x).relu()))


@functools.cache
def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("copy", "data", "model")[-len(shape) :])


def plain(net: Net, count: int) -> Net:
    return net


def fsdp(net: Net, count: int) -> Net:
    return shard(net, mesh_of(count))


def columns(net: Net, count: int) -> Net:
    mesh = mesh_of(count)
    fully_shard(net.up, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    return net


def tp(net: Net, count: int) -> Net:
    return parallelize_module(net, mesh_of(count), BY_TENSOR_PARALLELISM)


def fsdp_tp(net: Net, count: int) -> Net:
    mesh = mesh_of(count // 2, 2)
    parallelize_module(net, mesh["model"], BY_TENSOR_PARALLELISM)
    return shard(net, mesh["data"])


def hsdp(net: Net, count: int) -> Net:
    return shard(net, mesh_of(2, count // 2))


def hsdp_tp(net: Net, count: int) -> Net:
    mesh = mesh_of(2, count // 4, 2)
    parallelize_module(net, mesh["model"], BY_TENSOR_PARALLELISM)
    return shard(net, mesh["copy", "data"])


def shard(net: Net, mesh: Any) -> Net:
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


LAYOUTS: dict[str, Callable[[Net, int], Net]] = {
    each.__name__: each for each in (plain, fsdp, columns, tp, fsdp_tp, hsdp, hsdp_tp)
}


def made(layout: str, seed: int, is_trained: bool) -> dict[str, Any]:
    """A model in a layout, and its optimizer, before or after its first step."""
    torch.manual_seed(seed)
    count = dist.get_world_size() if dist.is_initialized() else 1
    net = LAYOUTS[layout](Net(), count)
    net.seen += seed
    state = {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=0.01 + seed)}
    if is_trained:
        train(state, seed)
    return state


def train(state: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state["model"](torch.randn(4, 6, generator=generator)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """Each tensor of a state, whole, by its name; and the learning rate."""
    net, optimizer = state["model"], state["optimizer"]
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found = dict(net.state_dict())
    for parameter, moments in optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{name}": each for name, each in moments.items()}
    whole = {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in found.items()
    }
    return {**whole, "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def check_same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()}"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{where}: {name}: {found[name]} {tensor}"


class Job:
    """One rank of a job; the checkpoints and what is right of them are in `directory`."""

    def __init__(self, directory: Path, manager: holdfast.CheckpointManager) -> None:
        self.directory, self.manager = directory, manager
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0

    def save(self, step: int, state: dict[str, Any]) -> None:
        whole = gathered(state)
        assert self.manager.save(step, state)
        train(state, 77)
        if self.is_first:
            torch.save(whole, self.directory / f"{step}.whole")
        self.manager.wait_until_finished()

    def restore(self, step: int, layout: str, is_trained: bool) -> dict[str, Any]:
        into = made(layout, 900, is_trained)
        places = [(id(p), memory_of(p)) for p in into["model"].parameters()]
        self.manager.restore(step, like=into)
        assert [(id(p), memory_of(p)) for p in into["model"].parameters()] == places
        expected = torch.load(self.directory / f"{step}.whole")
        check_same(gathered(into), expected, f"step {step} in {layout}, trained: {is_trained}")
        return into

    def is_of_modules(self, step: int) -> bool:
        return (self.directory / f"{step}.whole").exists()

    def run(self, layouts: list[str]) -> None:
        steps = self.manager.all_steps()
        for step in filter(self.is_of_modules, steps):
            for place, layout in enumerate(layouts):
                self.restore(step, layout, is_trained=(step + place) % 2 == 0)
        first = max(steps, default=-1) + 1
        for step, layout in enumerate(layouts, first):
            self.save(step, made(layout, step, is_trained=True))
        self.save(first + len(layouts), made(layouts[-1], 5, is_trained=False))
        for step, of_step in enumerate(layouts, first):
            for layout in layouts:
                into = self.restore(step, layout, is_trained=step % 2 == 0)
                if layout == of_step:
                    # It goes on as the training that was saved.
                    train(into, 77)
                    again = made(layout, step, is_trained=True)
                    train(again, 77)
                    check_same(gathered(into), gathered(again), f"after step {step}")
        for layout in layouts:
            self.restore(first + len(layouts), layout, is_trained=True)


def memory_of(tensor: Any) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).data_ptr()


def check_fsdp1(job: Job) -> None:
    """Fill the sharded state dicts of FSDP1, which have ShardedTensors, from those of FSDP2."""
    saved = made("fsdp", 3, is_trained=True)
    step = max(job.manager.all_steps()) + 1
    names = ("model", "optimizer")
    whole = gathered(saved)
    assert job.manager.save(step, dict(zip(names, get_state_dict(*saved.values()), strict=True)))
    job.manager.wait_until_finished()
    model = FullyShardedDataParallel(
        Net(),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    old = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)}
    train(old, 1)
    # Its sharded state dicts hold DTensors where the model has a device mesh, ShardedTensors here.
    into = dict(zip(names, get_state_dict(*old.values()), strict=True))
    kinds = {type(each).__name__ for each in into["model"].values()}
    assert "ShardedTensor" in kinds, kinds
    found = job.manager.restore(step, like=into)
    set_state_dict(
        *old.values(), model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(*old.values(), options=options)
    flat = {f"{name}.{k}": t for name, of in optimizer["state"].items() for k, t in of.items()}
    flat["lr"] = torch.tensor(optimizer["param_groups"][0]["lr"])
    check_same({**model, **flat}, whole, "FSDP1")


def check_meta(job: Job) -> None:
    """Fill a sharded model whose parameters have no memory yet."""
    step = min(job.manager.all_steps())
    with torch.device("meta"):
        empty = Net()
    shard(empty, mesh_of(dist.get_world_size()))
    job.manager.restore(step, like={"model": empty}, partial=["optimizer"])
    whole = torch.load(job.directory / f"{step}.whole")
    found = gathered({"model": empty, "optimizer": torch.optim.AdamW(empty.parameters())})
    names = found.keys() - {"lr"}
    check_same({n: found[n] for n in names}, {n: whole[n] for n in names}, "meta")


def run_rank(directory: Path, store: str, rank: int, count: int, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    if count > 1:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=100),
        )
    with holdfast.CheckpointManager(
        directory / "run",
        framework="torch",
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=preservation_policy.LatestN(1000),
    ) as manager:
        job = Job(directory, manager)
        job.run([layout for layout in layouts if layout in LAYOUTS])
        if "fsdp1" in layouts:
            check_fsdp1(job)
        if "meta" in layouts:
            check_meta(job)
    if count > 1:
        # Rank 0 writes what the others compare with.
        dist.barrier()
        dist.destroy_process_group()


def forked(run: Callable[[], None]) -> int:
    """Run a call in a process of its own; return the process's id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        run()
        code = 0
    finally:
        # It ends here, whatever is raised: what follows belongs to the other process.
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    directory, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for number, (count, layouts) in enumerate(jobs):
        store = f"file://{directory}/store-{number}"
        ranks = [
            forked(functools.partial(run_rank, directory, store, rank, count, layouts))
            for rank in range(count)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        if any(codes):
            sys.exit(f"job {number} of {count} ranks: exit codes {codes}")
        print(f"{count} ranks: {', '.join(layouts)}", flush=True)


if __name__ == "__main__":
    main()
