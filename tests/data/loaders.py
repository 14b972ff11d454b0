"""Read an order by PyTorch's loader on several ranks, be left, and go on with other ranks.

As a program it prints the samples that were used, by whether the batches are made by a source.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.data import Order


class Augmented:
    """A dataset whose samples have a random part, which the place in the order determines."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, sample: Any) -> tuple[int, int]:
        return int(sample), sample.seed % 1000


def loader(start: int, rank: int, count: int, workers: int, *, is_batched_by_source: bool) -> Any:
    from torch.utils.data import DataLoader

    order = Order(len(Augmented()), batch=6, seed=2, epochs=2)
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": list}
    if workers:
        options["multiprocessing_context"] = "fork"
    if is_batched_by_source:
        source = order.source(Augmented(), start, rank=rank, count=count)
        steps = range(start, len(source))
        return DataLoader(source, sampler=steps, batch_size=None, **options)  # type: ignore[arg-type]
    batches = order.batches(start, rank=rank, count=count)
    return DataLoader(Augmented(), batch_sampler=batches, **options)  # type: ignore[arg-type]


def samples_used(*, is_batched_by_source: bool) -> list[tuple[int, int]]:
    used: list[tuple[int, int]] = []
    for start, stop, count, workers in ((0, 3, 2, 2), (3, 8, 3, 0), (8, 20, 1, 1)):
        loaders = [
            iter(loader(start, rank, count, workers, is_batched_by_source=is_batched_by_source))
            for rank in range(count)
        ]
        for _ in range(start, stop):
            # A kill leaves what was read ahead.
            used += [sample for of_rank in loaders for sample in next(of_rank)]
        assert (stop == 20) == (next(loaders[0], None) is None)
        del loaders
    return used


if __name__ == "__main__":
    ways = {"batches": False, "source": True}
    print(json.dumps({n: samples_used(is_batched_by_source=way) for n, way in ways.items()}))
