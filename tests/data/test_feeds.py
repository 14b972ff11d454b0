"""What gives a training its samples in the global order: PyTorch's loader, Grain, streams."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.data import Order
from holdfast.errors import InvalidArgumentError
from tests import prepared
from tests.data.loaders import Augmented
from tests.hosts import ending

LOADERS = Path(__file__).with_name("loaders.py")
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_GRAIN = importlib.util.find_spec("grain") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch cannot be had here")
needs_grain = pytest.mark.skipif(not HAS_GRAIN, reason="Grain cannot be had here")


class Columns:
    """A dataset that reads many samples at once, as a `datasets.Dataset` does."""

    def __getitems__(self, samples: list[int]) -> list[int]:
        return [100 + sample for sample in samples]


def expected(order: Order, start: int, stop: int) -> list[tuple[int, int]]:
    return [(int(s), s.seed % 1000) for step in range(start, stop) for s in order.at(step)]


@needs_torch
def test_a_loader_of_pytorch_that_is_left_goes_on_with_other_ranks_and_workers() -> None:
    # A process of its own: JAX, which others of these tests use, warns of forked workers.
    with ending(prepared.start("torch", [str(LOADERS)], os.environ)) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    wanted = [[*sample] for sample in expected(Order(60, batch=6, seed=2), 0, 20)]
    for way, used in json.loads(out).items():
        assert used == wanted, way


@needs_grain
@pytest.mark.filterwarnings("ignore")
def test_grain_reads_a_source_from_any_step_on() -> None:
    import grain

    order = Order(60, batch=6, seed=2, epochs=2)
    used: list[tuple[int, int]] = []
    for start, stop, count in ((0, 3, 2), (3, 20, 1)):
        ranks = [
            iter(
                grain.MapDataset.source(
                    order.source(Augmented(), start, rank=rank, count=count)  # type: ignore[arg-type]
                )[start:].to_iter_dataset()
            )
            for rank in range(count)
        ]
        used += [s for _ in range(start, stop) for of_rank in ranks for s in next(of_rank)]
    assert used == expected(Order(60, batch=6, seed=2), 0, 20)
    endless = grain.MapDataset.source(Order(60, batch=6).source(Augmented(), 7))  # type: ignore[arg-type]
    assert next(iter(endless[10**12 :])) == expected(Order(60, batch=6), 10**12, 10**12 + 1)


def test_a_dataset_is_asked_for_all_samples_of_a_step_at_once() -> None:
    source = Order(60, batch=6, seed=2).source(Columns(), 0, rank=1, count=2)
    assert source[4] == [100 + int(n) for n in Order(60, batch=6, seed=2).at(4).of(1, 2).samples]
    with pytest.raises(IndexError):
        source[-1]
    with pytest.raises(IndexError):
        Order(60, batch=6, epochs=1).source(Columns(), 0)[10]


def test_an_endless_order_has_batches_without_a_length() -> None:
    batches = Order(5, batch=2).batches(3)
    assert [*map(len, itertools.islice(batches, 4))] == [2, 2, 2, 2]
    with pytest.raises(TypeError, match="does not end"):
        len(batches)
    assert len(Order(5, batch=2, epochs=2).batches(3)) == 2


def stream(length: int) -> Iterator[str]:
    return (f"s{number}" for number in range(length))


def test_a_stream_is_read_again_and_the_cost_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    used: list[str] = []
    state: dict[str, Any] = {}
    for start, stop, batch, count in ((0, 2, 6, 1), (2, 4, 6, 2), (4, 99, 9, 3)):
        order = Order(None, batch=batch, shuffle=False)
        if start:
            order.set_state(state)
        ranks = [order.replay(stream(50), start, rank=r, count=count) for r in range(count)]
        steps = zip(*ranks, strict=True)
        used += [s for shares in itertools.islice(steps, stop - start) for of in shares for s in of]
        state = order.get_state()
    assert used == [*stream(50)][:50]
    assert "read 12 samples of the stream again in 0.0 s" in caplog.messages
    assert "read 24 samples of the stream again in 0.0 s" in caplog.messages


def test_a_stream_of_an_order_with_epochs_ends_with_it() -> None:
    order = Order(10, batch=3, epochs=1, shuffle=False)
    assert [len(batch) for batch in order.replay(iter(range(10)), 0)] == [3, 3, 3, 1]


def test_samples_of_a_stream_are_skipped() -> None:
    order = Order(None, batch=4, shuffle=False)
    order.skip(1, steps=2, samples=[14])
    steps = [*order.replay(stream(20), 0)]
    assert [int(s[1:]) for step in steps for s in step] == [0, 1, 2, 3, 12, 13, *range(15, 20)]


def test_a_rest_of_a_stream_that_the_ranks_cannot_share_is_left_by_all() -> None:
    for is_dropped, rest in ((False, 1), (True, 0)):
        for size in (2, 3):
            order = Order(None, batch=4, shuffle=False, drop_last=is_dropped)
            ranks = [order.replay(stream(8 + size), 0, rank=r, count=3) for r in range(3)]
            counts = [len([*steps]) for steps in ranks]
            assert counts == [2 + (rest if size == 3 else 0)] * 3


def test_a_stream_that_would_cost_too_much_or_has_ended_is_refused() -> None:
    order = Order(None, batch=4, shuffle=False)
    with pytest.raises(InvalidArgumentError, match="40 samples would be read again"):
        order.replay(stream(50), 10, at_most=39)
    order.replay(stream(50), 10, at_most=40)
    with pytest.raises(InvalidArgumentError, match="has 30 samples, and step 10 is after them"):
        next(order.replay(stream(30), 10))
    with pytest.raises(InvalidArgumentError, match="shuffle=False"):
        Order(50, batch=4).replay(stream(50), 0)
