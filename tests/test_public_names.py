"""The public names, as decision 0049 lists them: one name for each thing, and each thing named."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest

import holdfast
from holdfast import building, data, errors, preservation_policy, reading, save_decision_policy

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
        (save_decision_policy, "should_save"),
        (preservation_policy, "should_preserve"),
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


PUBLIC = [holdfast, building, data, errors, preservation_policy, reading, save_decision_policy]
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
DOCUMENTED = [
    name
    for page in sorted(REFERENCE.glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)
    if name not in ("mkdocs", *(module.__name__ for module in PUBLIC))
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_the_reference_documents_has_a_public_name(name: str) -> None:
    module, _, last = name.rpartition(".")
    if module.startswith(("holdfast.torch", "holdfast.local_agent")):
        # `holdfast.torch` needs PyTorch, and the modules of `local_agent` are public themselves.
        pytest.importorskip(module, reason="PyTorch cannot be had here")
        assert hasattr(importlib.import_module(module), last)
        return
    documented = getattr(importlib.import_module(module), last)
    assert documented in [getattr(place, last, None) for place in PUBLIC]


def test_the_types_of_what_is_returned_are_public() -> None:
    records = [holdfast.CheckpointMetadata, holdfast.RestoreReport, holdfast.ArrayMetadata]
    hints = [hint for record in records for hint in get_type_hints(record).values()]
    while hints:
        hint = hints.pop()
        hints += get_args(hint)
        if getattr(hint, "__module__", "").startswith("holdfast."):
            assert getattr(holdfast, hint.__name__) is hint


def test_names_are_listed_and_imported_on_first_use() -> None:
    assert sorted(holdfast.__all__) == holdfast.__all__
    code = "import holdfast, sys; names = set(sys.modules); holdfast.reading; holdfast.building"
    done = subprocess.run([sys.executable, "-c", f"{code}; assert 'numpy' not in names"])
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["port", "interface", "tls", "prometheus_port", "failure_domain"])
def test_an_argument_that_is_elsewhere_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"RamTier.*'{name}'"):
        holdfast.RamTier(**{name: None})
    assert name in inspect.signature(holdfast.HostNetwork).parameters
