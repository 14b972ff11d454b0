"""One of two ranks that meet in a collective at each step. Arguments: directory, the hanging step.

Started by torchrun. In the first start, rank 1 waits before the collective of that step.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
from torch import distributed

import holdfast
from holdfast import save_decision_policy


def main() -> None:
    directory, hanging_step = sys.argv[1], int(sys.argv[2])
    is_first = os.environ["HOLDFAST_RESTART_COUNT"] == "0"
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    state = {"w": torch.zeros(4)}
    with holdfast.CheckpointManager(
        directory, save_decision_policy=save_decision_policy.FixedIntervalPolicy(1)
    ) as manager:
        start, state = manager.resume(state)
        for step in range(start, 12):
            if is_first and rank == 1 and step == hanging_step:
                threading.Event().wait()
            total = torch.ones(4)
            distributed.all_reduce(total)
            state["w"] += total
            manager.save(step, state)
        manager.finish(11, state)
    print(f"rank {rank}: w {float(state['w'][0])}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
