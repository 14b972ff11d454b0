"""Train a small network, divided by FSDP2, on the nodes of a torchrun job; train.sh starts it.

Environment: RUN is the run's directory, STEPS the number of steps (60), and STEP_SECS the least
time of one (0). Each rank appends its lines to RUN.logs/RANK: where it starts, and for each step
the loss and a digest of the whole state. These are the same on one rank and on two: each step has
two batches, which one rank takes in turn, and a half is exact in binary.
"""

import os
import time
import zlib
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import save_decision_policy as policies

RUN = os.environ["RUN"]
STEPS = int(os.environ.get("STEPS", "60"))
STEP_SECS = float(os.environ.get("STEP_SECS", "0"))
BATCH, WIDTH, BATCHES = 32, 64, 2


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    """Of predicting one of the step's batches, turned by one."""
    generator = torch.Generator().manual_seed(step * BATCHES + index)
    batch = torch.randn(BATCH, WIDTH, generator=generator)
    return nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on this rank's batches; returns the mean loss of all."""
    rank, count = dist.get_rank(), dist.get_world_size()
    optimizer.zero_grad()
    losses = torch.zeros(BATCHES)
    for index in range(rank, BATCHES, count):
        loss = loss_of(model, step, index)
        (loss * count / BATCHES).backward()  # FSDP2 divides by the number of ranks
        losses[index] = loss.detach()
    optimizer.step()
    dist.all_reduce(losses)
    return losses.mean().item()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of the bits of all parameters and of the optimizer's momentum."""
    crc = 0
    for parameter in model.parameters():
        for tensor in (parameter.detach(), optimizer.state[parameter]["momentum_buffer"]):
            assert isinstance(tensor, DTensor)
            crc = zlib.crc32(tensor.full_tensor().numpy().tobytes(), crc)
    return f"{crc:08x}"


def train(log: TextIO) -> None:
    """Go on from the newest checkpoint until the last step, or until told to leave."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    ram = holdfast.RamTier(save_decision_policy=policies.FixedIntervalPolicy(1))
    with holdfast.CheckpointManager(
        RUN, save_decision_policy=policies.FixedIntervalPolicy(50), ram=ram
    ) as manager:
        start, state = manager.resume(state)
        sources = manager.last_restore.sources if manager.last_restore else {}
        sizes = (f"{tier}={size}" for tier, size in sources.items())
        print("start", start, dist.get_world_size(), *sizes, file=log)
        for step in range(start, STEPS):
            began = time.monotonic()
            loss = train_step(model, optimizer, step)
            print("step", step, loss.hex(), digest(model, optimizer), file=log)
            time.sleep(max(0.0, began + STEP_SECS - time.monotonic()))
            manager.save(step, state)
            if manager.reached_preemption(step):
                print("preempted", step, file=log)
                return
        manager.finish(STEPS - 1, state)
        print("finished", STEPS - 1, file=log)


def main() -> None:
    """Join the other processes and train."""
    dist.init_process_group("gloo")
    logs = Path(f"{RUN}.logs")
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / str(dist.get_rank()), "a", buffering=1) as log:
        train(log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
