"""Train with PyTorch and torchdata's loader, and leave out what an exact restart needs.

    holdfast prove -- python torch_training.py CASE

Without a case it is exact: shuffled batches over several epochs, dropout, augmentation, a schedule.
With `workers` the loader has some. Each other case leaves out one thing, and `holdfast prove` finds
it:

    no-generator, no-exact-loader, no-random-state, no-loader, plain-loader, worker-randomness,
    sampler-epoch
"""

import sys

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.torch import ExactLoader, RandomState

STEPS = 16
SIZE = 24
BATCH = 4  # six batches an epoch
SEED = 7


class Points(Dataset):
    """Points on a plane and their classes, moved a little each time that they are loaded."""

    def __init__(self, size: int, random_workers: bool) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.points = torch.randn(size, 2, generator=generator)
        self.classes = (self.points.prod(1) > 0).long()
        self.random_workers = random_workers

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a point and its class."""
        point = self.points[index]
        # The numbers of a sample follow from its index, so that no generator is lost with a worker.
        # With an epoch they would follow from that too.
        of_index = torch.Generator().manual_seed(SEED + index)
        generator = None if self.random_workers else of_index
        return point + 0.1 * torch.randn(2, generator=generator), self.classes[index]


class EpochSampler(RandomSampler):
    """Shuffles by an epoch that the program has to set, as `DistributedSampler` does."""

    epoch = 0

    def __iter__(self):
        """Yield the indices of an epoch."""
        self.generator = torch.Generator().manual_seed(SEED + self.epoch)
        return super().__iter__()


def make_loader(case: str) -> DataLoader | ExactLoader:
    """Return the loader of a case."""
    data = Points(SIZE, random_workers=case == "worker-randomness")
    workers = 2 if case in ("workers", "worker-randomness") else 0
    kind = DataLoader if case == "plain-loader" else StatefulDataLoader
    generator = None if case == "no-generator" else torch.Generator().manual_seed(SEED)
    if case == "sampler-epoch":
        return ExactLoader(kind(data, BATCH, sampler=EpochSampler(data), generator=generator))
    loader = kind(data, BATCH, shuffle=True, generator=generator, num_workers=workers)
    inexact = "no-generator", "no-exact-loader", "no-loader", "plain-loader"
    return loader if case in inexact else ExactLoader(loader)


def main(case: str) -> None:
    """Train."""
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = make_loader(case)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if case not in ("no-loader", "plain-loader"):
        state["loader"] = loader
    if case != "no-random-state":
        state["random"] = RandomState()
    with holdfast.CheckpointManager("runs/torch") as manager:
        start, state = manager.resume(state)
        batches = iter(loader)
        for step in range(start, STEPS):
            batch = next(batches, None)
            if batch is None:
                if case == "sampler-epoch":
                    loader.loader.sampler.epoch += 1
                batches = iter(loader)
                batch = next(batches)
            points, classes = batch
            loss = torch.nn.functional.cross_entropy(model(points), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            manager.save(step, state, metrics={"loss": loss.item()})
            if manager.reached_preemption(step):
                break
        else:
            manager.finish(STEPS - 1, state)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "exact")
