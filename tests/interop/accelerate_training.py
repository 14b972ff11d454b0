"""Train with plain accelerate, whose objects are leaves of a state: `RUN OUTPUT STEP`.

RUN `-` trains without Holdfast. It is killed after STEP, and prints the last step and a digest of
the weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

import holdfast
from holdfast import save_decision_policy

RUN, LAST = sys.argv[1], int(sys.argv[3])
STEPS = 20


def main() -> None:
    torch.manual_seed(0)
    loading = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = torch.utils.data.DataLoader(torch.randn(160, 4), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": loader,
        "rng": holdfast.torch.RandomState(),
    }
    manager, start = None, 0
    if RUN != "-":
        every_3 = save_decision_policy.FixedIntervalPolicy(3)
        manager = holdfast.CheckpointManager(RUN, save_decision_policy=every_3)
        start, state = manager.resume(state)
    random = state["rng"].state_dict()
    batches = iter(loader)
    batch = next(batches)
    if start:
        state["rng"].load_state_dict(random)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        if manager is not None:
            manager.save(step, state)
        if step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = next(batches)
    if manager is not None:
        manager.finish(step, state)
        manager.close()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    print("ENDED", step, digest.hexdigest())


main()
