"""One process of a job that is started again: rank 1 is killed after step 5 with `killed`.

With `elastic` its number of processes may change, and no process has a state of its own.

No step is due in the durable tier, so what it continues from was in RAM. Prints a JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import save_decision_policy

STEPS = 9


def main(run: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.zeros(1000), mesh, [Shard(0)])}
    if "elastic" not in sys.argv:
        state["rng"] = holdfast.torch.RandomState()
    ram = holdfast.RamTier(save_decision_policy=save_decision_policy.FixedIntervalPolicy(1))
    never = save_decision_policy.SpecificStepsPolicy([10**9])
    with holdfast.CheckpointManager(run, ram=ram, save_decision_policy=never) as manager:
        start, _ = manager.resume(state)
        report = manager.last_restore
        for step in range(start, STEPS):
            state["w"] += step
            manager.save(step, state)
            manager.wait_until_finished()
            # All have sealed the step before one of them dies.
            dist.barrier()
            if step == 5 and sys.argv[2] == "killed" and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        whole = state["w"].full_tensor()
        assert torch.equal(whole, whole[:1].expand(1000))
        found = {"start": start, "w": float(whole[0])}
        print(json.dumps({**found, "sources": report.sources if report else {}}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
