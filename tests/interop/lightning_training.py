"""Train a tiny module with Lightning: `RUN OUTPUT STEP`, killed after STEP.

RUN `-` trains without Holdfast. It prints the last step and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import lightning.pytorch as lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import save_decision_policy
from holdfast.interop.trainers.lightning import HoldfastCallback

RUN, LAST = sys.argv[1], int(sys.argv[3])


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.Dropout(0.2),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 1),
        )

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Kill(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    module = Net()
    loader = StatefulDataLoader(torch.randn(40, 4), batch_size=4, shuffle=True)
    callbacks = [Kill()]
    if RUN != "-":
        every_3 = save_decision_policy.FixedIntervalPolicy(3)
        callbacks.append(HoldfastCallback(RUN, save_decision_policy=every_3))
    trainer = lightning.Trainer(
        max_epochs=3,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    digest = hashlib.sha256()
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    print("ENDED", trainer.global_step, digest.hexdigest())


main()
