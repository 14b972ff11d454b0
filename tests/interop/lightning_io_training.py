"""Train with Lightning's own checkpoints, which Holdfast stores: `FOLDER OUTPUT STEP`.

It is killed after STEP, and prints the last step and a digest of the weights. FOLDER `-` trains
without checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.interop.trainers.lightning import HoldfastCheckpointIO

FOLDER, LAST = sys.argv[1], int(sys.argv[3])


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8})
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
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
    loader = StatefulDataLoader(torch.randn(40, 4), batch_size=4)
    callbacks: list[Any] = [Kill()]
    if FOLDER != "-":
        callbacks.append(
            ModelCheckpoint(FOLDER, every_n_train_steps=3, save_top_k=2, monitor="step", mode="max")
        )
    trainer = lightning.Trainer(
        max_epochs=3,
        callbacks=callbacks,
        plugins=[HoldfastCheckpointIO()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=FOLDER != "-",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = sorted(Path(FOLDER).glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[-1]))
    trainer.fit(module, loader, ckpt_path=found[-1] if found else None)
    digest = hashlib.sha256()
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    print("ENDED", trainer.global_step, digest.hexdigest())


main()
