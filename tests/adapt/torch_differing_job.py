"""One process of a job of PyTorch in which one replica changes, as by a flipped bit."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import holdfast

ALONE = 1


def main(run: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "own": torch.tensor(dist.get_rank())}
    check = holdfast.ReplicaCheck(share=1.0, may_differ=["own"])
    with holdfast.CheckpointManager(run, replicas=check) as manager:
        manager.resume(state)
        manager.save(0, state, force=True)
        manager.wait_until_finished()
        if dist.get_rank() == ALONE:
            with torch.no_grad():
                optimizer.state[model.weight]["exp_avg"][3, 2] += 1e-6
        manager.save(1, state, force=True)
        manager.wait_until_finished()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
