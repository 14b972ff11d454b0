"""Train in several ranks, of which the first raises in step 17: `DIRECTORY`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import save_decision_policy


def main() -> None:
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    net = torch.nn.Linear(4, 4)
    parallel = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    state = {"net": net, "optimizer": optimizer}
    policy = save_decision_policy.FixedIntervalPolicy(100)
    raised_secs = 0.0
    try:
        with holdfast.CheckpointManager(
            sys.argv[1],
            save_decision_policy=policy,
            process=holdfast.ProcessHooks(keep_last=True),
        ) as manager:
            start, _ = manager.resume(state)
            for step in range(start, 30):
                optimizer.zero_grad()
                if step == 17 and is_first:
                    raised_secs = time.monotonic()
                    raise ValueError("bad batch")
                parallel(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                manager.save(step, state)
    except ValueError:
        print("LEFT", time.monotonic() - raised_secs, flush=True)
        raise


if __name__ == "__main__":
    main()
