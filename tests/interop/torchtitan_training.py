"""Train with torchtitan's containers, in the loop of its trainer: `RUN OUTPUT STEP`.

RUN `-` trains without Holdfast. It is killed after STEP, and prints the last step and a digest of
the weights. torchtitan's own trainer needs a GPU.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from holdfast.interop.trainers.torchtitan import HoldfastCheckpointManager

RUN, LAST = sys.argv[1], int(sys.argv[3])
STEPS = 20


class Loop:
    """What torchtitan's trainer has as its train state."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    loader = StatefulDataLoader(torch.randn(160, 4), batch_size=4, shuffle=True)
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=STEPS
    )
    loop = Loop()
    config = HoldfastCheckpointManager.Config(enable=RUN != "-", interval=3, keep_latest_k=2)
    parts: dict[str, Any] = {
        "dataloader": loader,
        "model_parts": [model],
        "optimizers": optimizers,
        "lr_schedulers": schedulers,
        "states": {"train_state": loop},
        "sd_adapter": None,
        "base_folder": str(Path(RUN).parent),
    }
    checkpointer = config.build(**parts)
    is_loaded = checkpointer.load(step=config.load_step)
    drawn = torch.get_rng_state()
    batches = iter(loader)
    if is_loaded:
        torch.set_rng_state(drawn)
    while loop.step < STEPS:
        loop.step += 1
        optimizers.zero_grad()
        model(next(batches)).square().mean().backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        checkpointer.save(loop.step, last_step=loop.step == STEPS)
        if loop.step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    print("ENDED", loop.step, digest.hexdigest())


main()
