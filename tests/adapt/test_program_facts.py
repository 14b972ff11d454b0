"""What is seen of a program's loaders and generators, and the warning about a loader."""

from __future__ import annotations

import gc
import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from holdfast.adapt.program_facts import (
    epochs_of,
    loader_problem,
    program_facts,
    random_streams,
)
from holdfast.torch import ExactLoader, RandomState
from tests.hosts import host

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loader of another test, and no trainer of another test's."""
    gc.collect()
    for name in ("accelerate", "lightning", "torchtitan", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def stateful(**arguments: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader([*range(8)], 2, shuffle=True, **arguments)


def test_the_streams_differ_when_they_were_drawn_from_and_looking_draws_nothing() -> None:
    before = random_streams()
    assert before == random_streams()
    random.random()
    np.random.random()
    torch.rand(1)
    after = random_streams()
    assert {name for name in before if before[name] != after[name]} == {"python", "numpy", "torch"}


def test_loaders_are_told_by_what_they_have_and_whether_they_are_in_the_state() -> None:
    plain, exact = (
        DataLoader([1, 2], num_workers=2),
        ExactLoader(stateful(generator=torch.Generator())),
    )
    facts = program_facts({"data": [exact], "rng": RandomState()})
    assert facts.random_paths == ("rng",)
    of_plain, of_exact = sorted(facts.loaders, key=lambda loader: loader.name)
    assert (of_plain.in_state, of_plain.has_state, of_plain.worker_count) == (False, False, 2)
    assert (of_exact.in_state, of_exact.is_exact, of_exact.has_generator) == (True, True, True)
    assert of_exact.is_random
    assert plain is not None


def test_epochs_of_samplers_are_seen() -> None:
    sampler = torch.utils.data.DistributedSampler([1, 2], num_replicas=1, rank=0)
    loader = DataLoader([1, 2], sampler=sampler)
    sampler.set_epoch(3)
    assert epochs_of() == {"DistributedSampler.epoch 0": 3}
    assert loader is not None


def test_a_loader_without_a_generator_beside_a_random_state_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = stateful()
    state = {"data": loader, "rng": RandomState()}
    assert "draws from PyTorch's generator" in str(loader_problem(state))
    assert loader_problem({"data": loader}) is None
    monkeypatch.setitem(sys.modules, "lightning", sys)
    assert loader_problem(state) is not None
    assert loader_problem({"rng": RandomState()}) is None  # a trainer's own way
    monkeypatch.delitem(sys.modules, "lightning")
    del loader, state
    gc.collect()
    good = ExactLoader(stateful(generator=torch.Generator()))
    assert loader_problem({"data": good, "rng": RandomState()}) is None
    evaluation = DataLoader([1, 2])
    assert loader_problem({"data": good, "rng": RandomState()}) is None
    assert evaluation is not None


def test_the_first_save_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"data": stateful(), "rng": RandomState()}
    with host() as one:
        monkeypatch.setenv("HOLDFAST_RAM", str(one.folder))
        monkeypatch.setenv("HOLDFAST_HOST", one.name)
        with (
            caplog.at_level(logging.WARNING, "holdfast"),
            holdfast.CheckpointManager(tmp_path / "run", framework="torch") as manager,
        ):
            for step in range(3):
                manager.save(step, state, force=True)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("draws from PyTorch's generator" in line for line in lines) == 1, lines
