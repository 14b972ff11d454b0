"""A state that is kept by reference says whether it is still that of its step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapt.contract import ArrayOutline
from holdfast.adapt.torch.computed import Computed
from holdfast.adapt.torch.held_state import HeldState
from holdfast.adapt.torch.state import TorchFramework
from holdfast.format.grid import Placement
from holdfast.format.layout import image_layout
from holdfast.torch import RandomState, Replicated
from holdfast.trainer.planning import NO_REPLICAS, specs_and_copies


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """Return a model with a buffer, its optimizer after a step, and the state of both."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, {"model": model, "optimizer": optimizer, "epoch": 3}


def test_gradients_change_no_state() -> None:
    model, optimizer, state = trained()
    held = TorchFramework().hold(state)
    model.eval()
    model(torch.randn(4, 3)).sum().backward()
    assert held.change() == ""
    optimizer.step()
    assert held.change().endswith("has changed since")


def test_a_buffer_that_the_forward_pass_changes_is_seen() -> None:
    model, _, state = trained()
    held = TorchFramework().hold(state)
    model(torch.randn(4, 3))
    assert held.change() == "model/1.num_batches_tracked has changed since"


def test_values_are_those_of_the_step() -> None:
    _, optimizer, state = trained()
    held, before = TorchFramework().hold(state), TorchFramework().snapshot(state)
    state["epoch"] = 4
    optimizer.param_groups[0]["lr"] = 0.5
    assert held.change() == ""
    snapshot = held.of_survivors([1])
    assert snapshot is not None
    assert snapshot.values == before.values


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (RandomState(), "x has a state of its own on each rank"),
        (np.zeros(3), "x is a NumPy array, whose changes are not counted"),
    ],
)
def test_what_cannot_be_saved_for_a_lost_rank_is_refused(leaf: Any, reason: str) -> None:
    held = TorchFramework().hold({"x": leaf})
    assert reason in (held.lost_with_a_rank() or held.change())


def test_states_that_are_the_same_on_all_ranks_are_kept() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    assert TorchFramework().hold({"x": Replicated(averaged)}).change() == ""


def test_tensors_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert "inference mode" in TorchFramework().hold({"x": tensor}).change()


def test_survivors_hold_tensors_that_all_ranks_have() -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    snapshot = TorchFramework().hold({"w": weights}).of_survivors([2, 3])
    assert snapshot is not None
    (array,) = snapshot.outline.arrays
    assert array.placement.holders == ((0,),)
    (chunk,) = image_layout(specs_and_copies(snapshot.outline, NO_REPLICAS)[0], 0).chunks
    assert bytes(snapshot.chunk_bytes(chunk)) == weights.numpy().tobytes()


def divided(*holders: tuple[int, ...]) -> HeldState:
    """Return a state of one tensor, each row of which is held by other ranks."""
    snapshot = TorchFramework().hold({"w": torch.zeros(len(holders), 2)}).of_survivors([0])
    assert snapshot is not None
    placement = Placement(
        shape=(len(holders), 2), dtype="float32", chunk_shape=(1, 2), holders=holders
    )
    own = ArrayOutline(path=("w",), placement=placement, prng_impl=None, scalar=False)
    object.__setattr__(snapshot.outline, "arrays", (own,))
    return HeldState(snapshot, [torch.zeros(1, 2)], [True], Computed(()))


def test_survivors_hold_the_chunks_that_data_parallelism_replicates() -> None:
    snapshot = divided((0, 2), (1, 3)).of_survivors([0, 1, 3])
    assert snapshot is not None
    assert snapshot.outline.arrays[0].placement.holders == ((0,), (1, 2))


def test_a_chunk_of_a_lost_rank_alone_is_lost() -> None:
    assert divided((0,), (1,), (2,)).of_survivors([0, 2]) is None
