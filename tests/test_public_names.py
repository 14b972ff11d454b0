"""The public names, as decision 0049 lists them: one name for each thing, and each thing named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest

import holdfast
from holdfast import reading

PLACES = [
    holdfast.CheckpointManager,
    holdfast.RemoteTier,
    holdfast.Run,
    holdfast.load,
    holdfast.open_run,
    holdfast.save,
    reading.open_checkpoint,
]


@pytest.mark.parametrize("call", PLACES, ids=lambda call: call.__name__)
def test_the_place_of_a_run_is_its_directory_and_the_first_argument(
    call: Callable[..., object],
) -> None:
    first = next(iter(inspect.signature(call).parameters.values()))
    assert first.name == "directory"
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_metrics_are_what_a_program_saves_with_a_checkpoint() -> None:
    takers = [holdfast.CheckpointManager.save, holdfast.CheckpointManager.finish, holdfast.save]
    assert all("metrics" in inspect.signature(call).parameters for call in takers)
    assert not hasattr(holdfast.CheckpointManager, "metrics")


@pytest.mark.parametrize(
    ("module", "method"),
    [
        (holdfast.save_decision_policy, "should_save"),
        (holdfast.preservation_policy, "should_preserve"),
    ],
    ids=["save", "preservation"],
)
def test_a_module_of_policies_has_policies_and_their_context(
    module: ModuleType, method: str
) -> None:
    exported = [getattr(module, name) for name in module.__all__]
    others = [each.__name__ for each in exported if not hasattr(each, method)]
    assert others in (["SaveContext"], ["PreservationContext"])
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert defined <= set(module.__all__)
