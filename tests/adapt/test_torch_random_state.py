"""The states of the random number generators under another number of processes."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest

import holdfast

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch cannot be had here", allow_module_level=True)

import torch


def drawn() -> tuple[float, ...]:
    """Return the next number of each generator."""
    return (torch.rand(1).item(), random.random(), float(np.random.random()))


def states(count: int) -> list[dict[str, Any]]:
    """Return the states of a job of `count` ranks."""
    made = []
    for rank in range(count):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        made.append(holdfast.torch.RandomState().state_dict())
    return made


def begun(saved: list[dict[str, Any]], rank: int, count: int) -> tuple[float, ...]:
    """Return the first numbers of a rank that gets the states of another number of ranks."""
    holdfast.torch.RandomState(per_rank=True).set_states(saved, rank=rank, count=count)
    return drawn()


def test_each_rank_has_numbers_of_its_own_that_depend_on_the_checkpoint_alone() -> None:
    saved = states(8)
    first = [begun(saved, rank, 3) for rank in range(3)]
    assert len({number for numbers in first for number in numbers}) == 9
    drawn()
    assert [begun(saved, rank, 3) for rank in range(3)] == first
    others = [begun(saved, 0, 4), begun(states(8)[::-1], 0, 3), begun(states(7), 0, 3)]
    for numbers in others:
        assert not {*numbers} & {number for of_rank in first for number in of_rank}


def test_it_is_asked_for() -> None:
    assert not hasattr(holdfast.torch.RandomState(), "set_states")
    assert not hasattr(holdfast.torch.RandomState(per_rank=False), "set_states")
