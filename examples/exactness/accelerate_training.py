"""Train with accelerate, and lose nothing when the program is killed.

    holdfast prove -- python accelerate_training.py

Shuffled batches over several epochs, dropout, a schedule. With `--careless` the loader itself is in
the state, which lacks the number of the epoch: `holdfast prove` finds the first epoch with other
batches.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import holdfast
from holdfast.interop.trainers.accelerate import PreparedLoader

EPOCHS = 3
SIZE = 24
BATCH = 4  # six batches an epoch
SEED = 7


def main(careless: bool) -> None:
    """Train."""
    set_seed(SEED)
    loading = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    points = torch.randn(SIZE, 2)
    data = torch.utils.data.TensorDataset(points, (points.prod(1) > 0).long())
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    loader = loader if careless else PreparedLoader(loader)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "data": loader,
        "random": holdfast.torch.RandomState(),
    }
    with holdfast.CheckpointManager("runs/accelerate") as manager:
        step, state = manager.resume(state)
        while step < EPOCHS * len(loader):
            for points, classes in loader:
                loss = torch.nn.functional.cross_entropy(model(points), classes)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                manager.save(step, state, metrics={"loss": loss.item()})
                if manager.reached_preemption(step):
                    return
                step += 1
        manager.finish(step - 1, state)


if __name__ == "__main__":
    main("--careless" in sys.argv)
