"""One process of a job of PyTorch in which one replica changes, as by a flipped bit.

It is saved to RAM alone at first. All ranks go back to where their replicas were equal, and end
with the state of a job without the change.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Literal

import torch
import torch.distributed as dist

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import HoldfastError
from holdfast.trainer.save import saver

ALONE, FLIPPED_AT, STEPS = 1, 6, 22
OVERTAKEN = 2
"""The rank whose saver's thread is ready to release the state while the training thread digests."""
LATE_SECS = 0.1


def new_state() -> dict:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    own = torch.tensor(dist.get_rank())
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "own": own}


def train_step(state: dict, step: int) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.full((2, 6), 1.0 + step)).square().sum().backward()
    state["optimizer"].step()


def digest_late() -> None:
    digest = saver.digests_of

    def late(*arguments: Any) -> list[str]:
        if threading.current_thread() is threading.main_thread():
            time.sleep(LATE_SECS)
        return digest(*arguments)

    saver.digests_of = late


def main(run: str) -> None:
    dist.init_process_group("gloo")
    rank, state, flips = dist.get_rank(), new_state(), 0
    if rank == OVERTAKEN:
        digest_late()
    check = holdfast.ReplicaCheck(
        share=1.0, may_differ=["own"], on_difference="rewind", vote_steps=4
    )
    with holdfast.CheckpointManager(
        run,
        replicas=check,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(4),
        ram=holdfast.RamTier(save_decision_policy=save_decision_policy.FixedIntervalPolicy(1)),
        preservation_policy=preservation_policy.LatestN(2),
    ) as manager:
        step, state = manager.resume(state)
        while step < STEPS:
            train_step(state, step)
            if (rank, step, flips) == (ALONE, FLIPPED_AT, 0):
                weight, flips = state["model"].weight, 1
                state["optimizer"].state[weight]["exp_avg"][3, 2] += 1
            manager.save(step, state)
            manager.wait_until_finished()
            if manager.replicas_differ:
                at = step
                step, state = manager.rewind(state)
                print(f"rank {rank} goes back from {at} to {step}", flush=True)
                continue
            step += 1
        manager.finish(STEPS - 1, state)
    clean = new_state()
    for step in range(STEPS):
        train_step(clean, step)
    if torch.equal(clean["model"].weight, state["model"].weight):
        print(f"rank {rank} is as without the difference", flush=True)
    for way in ("raise", "rewind"):
        end_with_a_difference(f"{run}-{way}", way)
    dist.destroy_process_group()


def end_with_a_difference(run: str, way: Literal["raise", "rewind"]) -> None:
    """Change a replica before the only save, at a step without a vote."""
    rank, weights = dist.get_rank(), torch.ones(8)
    weights[3] += rank == ALONE
    check = holdfast.ReplicaCheck(share=1.0, on_difference=way)
    try:
        with holdfast.CheckpointManager(run, replicas=check) as manager:
            manager.resume({"w": weights})
            manager.finish(1, {"w": weights})
    except HoldfastError as error:
        print(f"{way} at the end of rank {rank}: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
