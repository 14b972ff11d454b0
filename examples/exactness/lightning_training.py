"""Train with Lightning, and lose nothing when the program is killed.

    holdfast prove -- python lightning_training.py

Shuffled batches over several epochs, dropout, a schedule, a validation after each epoch. The loader
is a StatefulDataLoader without a generator of its own: Lightning restores the generator of all.
With `generator` it has one, and `holdfast prove` finds the next epoch with other batches.
"""

import sys

import lightning.pytorch as lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.interop.trainers.lightning import HoldfastCallback

EPOCHS = 3
SIZE = 24
BATCH = 4  # six batches an epoch
SEED = 7


class Classifier(lightning.LightningModule):
    """A small network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
        )

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        points, classes = batch
        return torch.nn.functional.cross_entropy(self.layers(points), classes)

    def validation_step(self, batch, index):
        """Return the loss of a batch of the validation."""
        return self.training_step(batch, index)

    def configure_optimizers(self):
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def main(case: str) -> None:
    """Train."""
    lightning.seed_everything(SEED, verbose=False)
    points = torch.randn(SIZE, 2)
    data = torch.utils.data.TensorDataset(points, (points.prod(1) > 0).long())
    generator = torch.Generator().manual_seed(SEED) if case == "generator" else None
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        callbacks=[HoldfastCallback("runs/lightning")],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = StatefulDataLoader(data, BATCH, shuffle=True, generator=generator)
    trainer.fit(Classifier(), loader, torch.utils.data.DataLoader(data, SIZE))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "exact")
