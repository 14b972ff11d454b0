"""A loader of accelerate continues from each step, into later epochs, with all random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from holdfast.errors import InvalidArgumentError

pytest.importorskip("accelerate", reason="accelerate cannot be had here")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata cannot be had here")

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from holdfast.adapt.program_facts import loader_problem, program_facts
from holdfast.interop.trainers.accelerate import PreparedLoader
from holdfast.torch import RandomState

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EPOCH = 3
STEPS = 3 * EPOCH + 1


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc, type-arg]
    def __iter__(self) -> Any:
        return iter(range(12))


def prepared(data: Any = range(12), stateful: bool = True, seedable: bool = True) -> Any:
    torch.manual_seed(7)
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=seedable
    )
    is_stream = isinstance(data, torch.utils.data.IterableDataset)
    loader = torch.utils.data.DataLoader(data, 4, shuffle=None if is_stream else True)
    return Accelerator(cpu=True, dataloader_config=loading).prepare(loader)


def steps(loader: Any, count: int, states: list | None = None) -> list[tuple[list[int], float]]:
    """The next `count` batches, each with a random number that is drawn after it."""
    taken: list[tuple[list[int], float]] = []
    while len(taken) < count:
        for batch in loader:
            taken.append((batch.tolist(), torch.rand(()).item()))
            if states is not None:
                states.append((copy.deepcopy(loader.state_dict()), torch.get_rng_state()))
            if len(taken) == count:
                break
    return taken


def continued(loader: Any, state: tuple[dict, torch.Tensor], count: int) -> list:
    loader.load_state_dict(copy.deepcopy(state[0]))
    torch.set_rng_state(state[1])
    return steps(loader, count)


@pytest.mark.parametrize("data", [range(12), Numbers()], ids=["samples", "stream"])
def test_it_continues_from_every_step_with_all_later_epochs(data: Any) -> None:
    states: list = []
    whole = steps(PreparedLoader(prepared(data)), STEPS, states)
    if data == range(12):
        assert sorted(n for batch, _ in whole[:EPOCH] for n in batch) == [*range(12)]
        assert whole[0][0] != whole[EPOCH][0]
    for step, state in enumerate(states[:-1]):
        restored = PreparedLoader(prepared(data))
        rest = continued(restored, state, STEPS - 1 - step)
        assert rest == whole[step + 1 :], step
        restored.load_state_dict(copy.deepcopy(state[0]))
        assert restored.state_dict() == state[0]
    # In place too, by a process that goes back.
    used = PreparedLoader(prepared(data))
    steps(used, EPOCH + 2)
    for step in (1, EPOCH - 1):
        assert continued(used, states[step], STEPS - 1 - step) == whole[step + 1 :]
    assert len(PreparedLoader(prepared())) == EPOCH


def test_the_loader_of_accelerate_alone_does_not() -> None:
    # If it does some day, `PreparedLoader` is not needed any more.
    states: list = []
    whole = steps(prepared(), STEPS, states)
    rest = continued(prepared(), states[EPOCH], STEPS - 1 - EPOCH)
    assert [batch for batch, _ in rest] != [batch for batch, _ in whole[EPOCH + 1 :]]


def test_loaders_that_cannot_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"accelerator.prepare has returned, found a"):
        PreparedLoader(torch.utils.data.DataLoader([1, 2, 3]))
    with pytest.raises(InvalidArgumentError, match="found one without; give the Accelerator"):
        PreparedLoader(prepared(stateful=False))
    with pytest.raises(InvalidArgumentError, match="found a RandomSampler; give the Accelerator"):
        PreparedLoader(prepared(seedable=False))


def test_a_prepared_loader_in_the_state_is_a_problem_unless_it_is_wrapped() -> None:
    loader = prepared()
    state = {"data": loader, "rng": RandomState()}
    assert "accelerate.PreparedLoader(loader)" in str(loader_problem(state))
    (facts,) = [f for f in program_facts(state).loaders if f.in_state]
    assert (facts.is_prepared, facts.is_exact, facts.is_torch) == (True, False, True)
    state["data"] = PreparedLoader(loader)
    assert loader_problem(state) is None
    (facts,) = [f for f in program_facts(state).loaders if f.in_state]
    assert facts.is_exact
