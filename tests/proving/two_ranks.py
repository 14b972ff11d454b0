"""A training of several ranks with DDP or FSDP2, under torchrun or `holdfast run --nproc`.

Argument: `ddp` or `fsdp`. With `FAULT` in the environment rank 1 flips a bit of its own part of a
moment at step 15, before that is saved.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import preservation_policy, save_decision_policy

STEPS, FAULT_STEP = 21, 15


def flip(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
    moment = optimizer.state[weight]["exp_avg"]
    local = moment.to_local() if isinstance(moment, DTensor) else moment
    local.view(torch.int32).view(-1)[3] ^= 1 << 20


def train(job: object = None) -> None:
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    if sys.argv[1] == "fsdp":
        fully_shard(model)
        forward = model
    else:
        forward = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    order = holdfast.data.Order(len(data), batch=8, seed=1)
    random = holdfast.torch.RandomState(per_rank=True)
    state = {"model": model, "optimizer": optimizer, "order": order, "random": random}
    with holdfast.CheckpointManager(
        "run",
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(5),
        preservation_policy=preservation_policy.LatestN(None),
    ) as manager:
        start, state = manager.resume(state)
        if start == 0:
            torch.manual_seed(rank)
        for step in range(start, STEPS):
            batch = data[order.at(step).of(rank, count).samples]
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(forward(batch), batch)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if "FAULT" in os.environ and (rank, step) == (1, FAULT_STEP):
                flip(optimizer, model.get_submodule("2").weight)
            manager.save(step, state, metrics={"loss": mean.item()})
            if manager.reached_preemption(step):
                return
        manager.finish(STEPS - 1, state)


if __name__ == "__main__":
    if "HOLDFAST_MEMBER" in os.environ:
        holdfast.torch.surviving(train)
    else:
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
