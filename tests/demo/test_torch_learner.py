"""The demo's model in PyTorch: it learns, it is deterministic, and its digest sees every bit."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here")

from holdfast.demo.learner import ModelConfig, TrainerOptions  # noqa: E402
from holdfast.demo.torch_learner import TorchLearner, digest  # noqa: E402

SMALL = ModelConfig(width=32, heads=2, layers=1)
TEXT = np.frombuffer(b"abcd" * 65, dtype=np.uint8).reshape(4, 65)


def _trained(steps: int, config: ModelConfig = SMALL, seed: int = 0):
    learner = TorchLearner(TrainerOptions(run="", journal="", config=config, steps=48, seed=seed))
    state, losses = learner.initial_state(), []
    for _ in range(steps):
        state, loss = learner.train_step(state, TEXT)
        losses.append(loss)
    return learner.state_digests(state), losses


@pytest.fixture(autouse=True)
def _as_before():
    with torch.random.fork_rng():
        yield
    torch.use_deterministic_algorithms(False)


def test_training_lowers_the_loss() -> None:
    _, losses = _trained(48)
    assert 5.0 < losses[0] < 6.0
    assert losses[-1] < 0.7 * losses[0]


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    first, again, other = _trained(4), _trained(4), _trained(4, seed=1)
    assert first == again
    assert first[0].params != other[0].params
    assert first[0].rng != other[0].rng


def test_dropout_depends_on_the_rng() -> None:
    with_dropout = ModelConfig(width=32, heads=2, layers=1, dropout=0.5)
    learner = TorchLearner(TrainerOptions(run="", journal="", config=with_dropout, steps=4))
    losses = set()
    for seed in (1, 2):
        state = learner.initial_state()
        torch.manual_seed(seed)
        losses.add(learner.train_step(state, TEXT)[1])
    assert len(losses) == 2


def test_one_changed_bit_changes_the_digest() -> None:
    ones = torch.ones(5000)
    changed = ones.clone()
    changed[2500] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert digest({"a": ones, "b": 2}) == digest({"b": 2, "a": ones.clone()})
    others = [{"a": changed, "b": 2}, {"a": ones, "c": 2}, {"a": ones, "b": 3}]
    assert len({digest({"a": ones, "b": 2}), *map(digest, others)}) == 4
