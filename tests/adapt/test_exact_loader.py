"""`ExactLoader` continues with the batches that would have come, from each step and into epochs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import InvalidArgumentError
from holdfast.torch import ExactLoader
from tests.hosts import Host, finished

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EPOCH = 3
STEPS = 4 * EPOCH


@pytest.fixture(autouse=True)
def _quiet_import() -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


def loader(
    workers: int = 0, samples: int = 12, batch_size: int = 4, **arguments: Any
) -> ExactLoader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(7)
    arguments = {"shuffle": True, "generator": generator} | arguments
    return ExactLoader(
        StatefulDataLoader([*range(samples)], batch_size, num_workers=workers, **arguments)
    )


def batches(of: Any, count: int, states: list | None = None) -> list[list[int]]:
    """The next `count` batches, with the state after each."""
    iterator, taken = iter(of), []
    for _ in range(count):
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(of)
            batch = next(iterator)
        taken.append(batch.tolist())
        if states is not None:
            states.append(copy.deepcopy(of.state_dict()))
    return taken


def test_it_continues_from_every_step_with_all_later_epochs() -> None:
    states: list = []
    whole = batches(loader(), STEPS, states)
    assert sorted(index for batch in whole[:EPOCH] for index in batch) == [*range(12)]
    assert whole[:EPOCH] != whole[EPOCH : 2 * EPOCH]
    for step, state in enumerate(states[:-1]):
        restored = loader()
        restored.load_state_dict(copy.deepcopy(state))
        assert batches(restored, STEPS - 1 - step) == whole[step + 1 :], step


def check_next_epoch(workers: int) -> None:
    states: list = []
    whole = batches(loader(workers), 2 * EPOCH, states)
    for asks in (False, True):
        restored = loader(workers)
        restored.load_state_dict(copy.deepcopy(states[EPOCH - 1]))
        if asks:
            restored.state_dict()
        assert [batch.tolist() for batch in restored] == whole[EPOCH:]


def check_refusal(saved: int, now: int) -> None:
    states: list = []
    batches(loader(saved), 1, states)
    with pytest.raises(InvalidArgumentError, match=f"num_workers={saved}, as .* found {now};"):
        loader(now).load_state_dict(states[0])


def test_after_the_last_batch_of_an_epoch_the_next_one_begins() -> None:
    check_next_epoch(workers=0)


def test_another_number_of_workers_is_refused() -> None:
    check_refusal(0, 2)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"samples": 16}, r"len\(dataset\)=12, .* found 16;"),
        ({"batch_size": 3}, "batch_size=4, .* 3;"),
    ],
)
def test_a_position_among_other_batches_is_refused(other: dict[str, int], text: str) -> None:
    states: list = []
    batches(loader(), 1, states)
    with pytest.raises(InvalidArgumentError, match=text):
        loader(**other).load_state_dict(states[0])
    # A state of an earlier version does not have it.
    del states[0]["samples"], states[0]["batch_size"]
    loader(**other).load_state_dict(states[0])


def test_with_workers_it_is_the_same(one_host: Host, tmp_path: Path) -> None:
    # Workers are forks, which a process with JAX in it should not make.
    script = tmp_path / "workers.py"
    script.write_text(
        "from tests.adapt.test_exact_loader import check_next_epoch, check_refusal\n"
        "check_next_epoch(workers=2)\n"
        "check_refusal(2, 0)\n"
    )
    finished(one_host.start(script, stem="torch"))


def test_torchdatas_loader_alone_does_not() -> None:
    # If it does some day, `ExactLoader` is not needed any more.
    states: list = []
    whole = batches(loader().loader, STEPS, states)
    restored = loader().loader
    restored.load_state_dict(states[0])
    rest = batches(restored, STEPS - 1)
    assert rest[: EPOCH - 1] == whole[1:EPOCH]
    assert rest != whole[1:]


def test_a_state_that_was_restored_is_the_same_before_the_first_batch() -> None:
    first = loader()
    batches(first, 1)
    state = copy.deepcopy(first.state_dict())
    restored = loader()
    restored.load_state_dict(copy.deepcopy(state))
    assert torch.equal(restored.state_dict()["generator"], state["generator"])
    assert len(restored) == EPOCH


def test_loaders_that_cannot_are_refused() -> None:
    plain = torch.utils.data.DataLoader([1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="pass a StatefulDataLoader of torchdata"):
        ExactLoader(plain)
    with pytest.raises(InvalidArgumentError, match=r"generator=torch.Generator\(\)"):
        loader(generator=None)
