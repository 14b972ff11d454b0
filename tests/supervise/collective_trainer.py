"""Ranks that meet in a collective at each step. Arguments: directory, faults as JSON.

Each fault is [start, rank, step, kind]: in that start of the command, the rank does so before the
collective of that step: `wait` forever, or `stop` itself by SIGSTOP. Started by torchrun or with
variables like its own, it is one rank; else it starts two, as processes that it forks. Each rank
adds its steps to a file beside the run, and takes `COLLECTIVE_STEP_SECS` for one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import distributed

import holdfast
from holdfast import save_decision_policy

RANKS = 2
STEPS_MAX = int(os.environ.get("COLLECTIVE_STEPS", "12"))
STEP_SECS = float(os.environ.get("COLLECTIVE_STEP_SECS", "0"))


def main() -> None:
    directory, faults = sys.argv[1], json.loads(sys.argv[2])
    start = int(os.environ["HOLDFAST_RESTART_COUNT"])
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        rank = fork_ranks()
        store = f"file://{directory}.store-{start}"
        distributed.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    rank = distributed.get_rank()
    due = {step: kind for of, own, step, kind in faults if (of, own) == (start, rank)}
    state = {"w": torch.zeros(4)}
    with (
        open(f"{directory}.steps-{rank}", "a", buffering=1) as steps,
        holdfast.CheckpointManager(
            directory, save_decision_policy=save_decision_policy.FixedIntervalPolicy(1)
        ) as manager,
    ):
        first, state = manager.resume(state)
        for step in range(first, STEPS_MAX):
            if step in due:
                note_fault(directory, due[step])
                if due[step] == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    threading.Event().wait()
            total = torch.ones(4)
            distributed.all_reduce(total)
            state["w"] += total
            manager.save(step, state)
            steps.write(f"{step}\n")
            time.sleep(STEP_SECS)
        manager.finish(STEPS_MAX - 1, state)
    print(f"rank {rank}: w {float(state['w'][0])}", flush=True)
    distributed.destroy_process_group()


def fork_ranks() -> int:
    """Start the ranks, and return in each; the launcher ends with the first one that fails."""
    pids = set()
    for rank in range(RANKS):
        if not (pid := os.fork()):
            return rank
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    sys.exit(0)


def note_fault(directory: str, kind: str) -> None:
    """Add the kind and the time to the file of faults beside the run."""
    with Path(f"{directory}.faults").open("a") as file:
        file.write(json.dumps([kind, time.monotonic()]) + "\n")


if __name__ == "__main__":
    main()
