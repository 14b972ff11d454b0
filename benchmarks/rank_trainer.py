"""A rank of a training of 100 MB until it is killed: `SYSTEM DIRECTORY JOURNAL`.

Each step of a rank is a line of the journal: its process, the step, and the time of its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 2041
"""The state of three square matrices and their momenta has 100 MB."""
INTERVAL = 5
"""A checkpoint is made every so many steps."""
TUNED_SECS = 5.0
RANKS = 4


def main() -> None:
    """Trains with what the first argument names."""
    system, directory, path = sys.argv[1:]
    torch.set_num_threads(1)
    train = Training(directory, path)
    if system in ("spares", "keep-last"):
        from holdfast.torch import surviving

        surviving(train.of_job, keep_last=system == "keep-last")
    elif system == "floor":
        from holdfast.torch import surviving

        surviving(train.without_state)
    elif system == "torchrun":
        dist.init_process_group("gloo")
        train.saved()
    else:
        train.of_torchft(is_tuned=system == "torchft, tuned")


class Training:
    """One rank."""

    def __init__(self, directory: str, path: str) -> None:
        self._directory = directory
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _say(self, step: int) -> None:
        line = {"pid": os.getpid(), "step": step, "secs": time.perf_counter()}
        os.write(self._journal, json.dumps(line).encode() + b"\n")

    def _build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        model = torch.nn.Sequential(*layers)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def _step(self, model: torch.nn.Module, optimizer: Any) -> None:
        loss = model(torch.ones(4, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def of_job(self, job: Any) -> None:
        """Trains as a rank of `surviving`."""
        self.saved()

    def saved(self) -> None:
        """Trains with Holdfast and the default process group."""
        import holdfast
        from holdfast import save_decision_policy

        model, optimizer = self._build()
        state = {"model": model, "optimizer": optimizer}
        policy = save_decision_policy.FixedIntervalPolicy(INTERVAL)
        with holdfast.CheckpointManager(
            self._directory, ram=holdfast.RamTier(save_decision_policy=policy)
        ) as manager:
            start, _ = manager.resume(state)
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            for step in range(start, sys.maxsize):
                self._step(wrapped, optimizer)
                self._say(step)
                manager.save(step, state)

    def without_state(self, job: Any) -> None:
        """Trains without checkpoints: all begin anew at the step of the one that is farthest."""
        model, optimizer = self._build()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        step = torch.tensor([self._farthest()])
        dist.all_reduce(step, dist.ReduceOp.MAX)
        for each in range(int(step) + 1, sys.maxsize):
            self._step(wrapped, optimizer)
            self._say(each)

    def _farthest(self) -> int:
        with open(f"/proc/self/fd/{self._journal}", encoding="utf-8") as lines:
            return max((json.loads(line)["step"] for line in lines), default=-1)

    def of_torchft(self, *, is_tuned: bool) -> None:
        """Trains as a replica of torchft, with its manager and optimizer.

        Its wrapper of `DistributedDataParallel` is not used: a lost peer ends it by an
        AssertionError (torchft 0.2.0).
        """
        from torchft import Manager, Optimizer, ProcessGroupGloo

        model, plain = self._build()

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            plain.load_state_dict(state["optimizer"])

        limit = timedelta(seconds=TUNED_SECS)
        times = {"timeout": limit, "quorum_timeout": limit, "connect_timeout": limit}
        tuned = {**times, "heartbeat_interval": timedelta(milliseconds=50)}
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=limit) if is_tuned else ProcessGroupGloo(),
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            replica_id=f"replica-{os.getpid()}-",
            **(tuned if is_tuned else {}),
        )
        optimizer = Optimizer(manager, plain)
        while True:
            before = manager.current_step()
            loss = model(torch.ones(4, WIDTH)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            flat = torch.cat([each.flatten() for each in gradients])
            manager.allreduce(flat).wait()
            pieces = flat.split([each.numel() for each in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
            optimizer.step()
            if manager.current_step() > before:
                self._say(manager.current_step())


if __name__ == "__main__":
    main()
