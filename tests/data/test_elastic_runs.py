"""Runs that are killed and go on with other numbers of ranks and workers, against one that is not.

The ranks, the workers that read ahead, the kills and the commits are simulated; the order is real.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator

import pytest

from holdfast.data import Order
from holdfast.format.values import decode_value, encode_value

RUNS, OF_EACH_TEST = 1000, 100


def loaded(order: Order, start: int, rank: int, count: int, workers: int) -> Iterator[list[int]]:
    """Yield a rank's batches as a loader does whose workers have read ahead."""
    ahead: deque[list[int]] = deque()
    for batch in order.batches(start, rank=rank, count=count):
        ahead.append([int(sample) for sample in batch])
        if len(ahead) > 2 * workers:
            yield ahead.popleft()
    yield from ahead


class Run:
    """One simulated run: its committed checkpoints, and what each step of its timeline used."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.has_one_batch_size = self.random.random() < 0.5
        self.batch = self.random.randint(8, 24)
        self.length = self.random.randint(20, 300)
        self.arguments = {
            "seed": seed,
            "shuffle": self.random.random() < 0.8,
            "epochs": self.random.randint(1, 3),
            "drop_last": True,
        }
        self.committed: dict[int, object] = {}
        self.used: dict[int, list[int]] = {}
        self.is_finished = False

    def order(self, batch: int) -> Order:
        return Order(self.length, batch=batch, **self.arguments)  # type: ignore[arg-type]

    def attempt(self) -> None:
        """Train from the newest checkpoint until a kill, with new ranks and workers."""
        ranks, workers = self.random.randint(1, 8), self.random.randint(0, 4)
        batch = self.batch if self.has_one_batch_size else self.random.randint(8, 24)
        orders = [self.order(batch) for _ in range(ranks)]
        newest = max(self.committed, default=-1)
        for order in orders:
            if newest >= 0:
                order.set_state(decode_value(self.committed[newest]))  # type: ignore[arg-type]
        start = newest + 1
        self.used = {step: used for step, used in self.used.items() if step < start}
        killed_after = self.random.randint(0, 12)
        loaders = [loaded(order, start, rank, ranks, workers) for rank, order in enumerate(orders)]
        for step, shares in enumerate(zip(*loaders, strict=True), start):
            if step - start >= killed_after:
                return
            self.used[step] = [sample for share in shares for sample in share]
            if self.random.random() < 0.4:
                rank = self.random.randrange(ranks)
                self.committed[step] = encode_value(orders[rank].get_state(), "data")
        self.is_finished = True


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(100, RUNS, OF_EACH_TEST))],
)
def test_a_run_uses_the_samples_of_one_that_is_never_killed(first: int) -> None:
    for seed in range(first, first + OF_EACH_TEST):
        run = Run(seed)
        while not run.is_finished:
            run.attempt()
        used = [sample for step in sorted(run.used) for sample in run.used[step]]
        whole = run.order(run.batch if run.has_one_batch_size else 1)
        assert whole.steps is not None
        expected = [int(n) for step in range(whole.steps) for n in whole.at(step).samples]
        # With other batch sizes another number of samples is left over at the end.
        expected = expected if run.has_one_batch_size else expected[: len(used)]
        assert Counter(used) == Counter(expected), f"seed {seed}"
        assert used == expected, f"seed {seed}"
        assert len(expected) > run.arguments["epochs"] * run.length - 24
