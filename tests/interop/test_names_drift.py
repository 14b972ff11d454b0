"""What the stand-ins replace is as it was when they were written: names, methods and parameters.

A new version of a trainer, or of Orbax or PyTorch, that has another interface fails here, by the
names that differ, before a training does. `make trainers` runs it with the trainers that are in
environments of their own, and with the newest released versions.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import inspect
import operator
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ORBAX_MISSING = {
    # Handlers name what an item is; Holdfast calls none of its own.
    "*CheckpointHandler.*",
    # Temporary paths and operations of Orbax's files.
    "Checkpointer.*_temporary_path",
    "Checkpointer.synchronize_next_awaitable_signal_operation_id",
    # Bridges to the first interface, inside of Orbax.
    "v1.options.*Options.v0",
    "v1.options.MemoryOptions.RegulatorOptions",
    "v1.handlers.PyTreeHandler.validate_*",
}
"""Members of Orbax's classes that are not there, with the reasons above."""


def parameters(call: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return {}


def not_taken(original: Any, own: Any) -> list[str]:
    """The parameters of `original` that `own` does not take by name."""
    given, taken = parameters(original), parameters(own)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()) or not taken:
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, each in given.items()
        if name not in taken and each.kind not in variable and not name.startswith("_")
    ]


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield name, value


def drift_of_class(place: str, original: type, own: type) -> Iterator[str]:
    for name, value in members(original):
        fields = getattr(own, "__dataclass_fields__", {})
        if not hasattr(own, name) and name not in fields:
            yield f"{place}.{name}: not there"
        elif inspect.isfunction(value):
            for parameter in not_taken(value, getattr(own, name)):
                yield f"{place}.{name}: {parameter} is not taken"


def is_expected(found: str, patterns: set[str]) -> bool:
    name = found.partition(":")[0]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def orbax_places() -> list[str]:
    try:
        from holdfast.interop.orbax.missing_names import MISSING
    except ImportError:
        return []
    return list(MISSING) if importlib.util.find_spec("orbax") else []


@pytest.mark.parametrize("place", orbax_places())
def test_orbax(place: str) -> None:
    from holdfast.interop.orbax.missing_names import MISSING
    from tests.interop.test_orbax_names import is_for_programs, module

    orbax, own = module("orbax.checkpoint", place), module("holdfast.interop.orbax", place)
    drift: list[str] = []
    for name, value in vars(orbax).items():
        if not is_for_programs(place, name, value) or name in MISSING[place]:
            continue
        if isinstance(value, types.ModuleType) or (place, name) == ("v1", "Context"):
            continue
        ours, full_name = getattr(own, name), f"{place}.{name}".lstrip(".")
        drift += [f"{full_name}: {each} is not taken" for each in not_taken(value, ours)]
        if isinstance(value, type) and isinstance(ours, type):
            drift += drift_of_class(full_name, value, ours)
    assert [each for each in drift if not is_expected(each, ORBAX_MISSING)] == []


def test_contexts_of_orbax() -> None:
    orbax = pytest.importorskip("orbax.checkpoint", reason="Orbax cannot be had here").v1
    from holdfast.interop.orbax import v1

    own, drift = v1.Context(), []
    for name, _ in members(orbax.Context):
        if not hasattr(own, name):
            drift.append(name)
    arguments = [name for name in parameters(orbax.Context) if name != "context"]
    # Ours takes them by name, and refuses others.
    v1.Context(own, **dict.fromkeys(arguments))
    for group in own.groups:
        drift += fields_that_differ(group, getattr(orbax.Context(), group), getattr(own, group))
    assert drift == []


def fields_that_differ(place: str, original: Any, own: Any) -> Iterator[str]:
    theirs, ours = (set(each.__dataclass_fields__) for each in (original, own))
    yield from (f"{place}.{name}" for name in sorted(theirs ^ ours))
    for name in theirs & ours:
        if hasattr(getattr(own, name), "__dataclass_fields__"):
            yield from fields_that_differ(
                f"{place}.{name}", getattr(original, name), getattr(own, name)
            )


def public(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(module), name)


DCP = "torch.distributed.checkpoint"
WRITER = "reset set_up_storage_writer prepare_local_plan prepare_global_plan write_data finish"
READER = "reset read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan"
CALLBACK = "on_train_begin on_epoch_begin on_step_begin on_step_end"
INTERFACES = {
    "DCP's writer": (DCP, "StorageWriter", f"{WRITER} validate_checkpoint_id storage_meta"),
    "DCP's reader": (DCP, "StorageReader", f"{READER} read_data validate_checkpoint_id"),
    "DCP's stager": (
        f"{DCP}.staging",
        "AsyncStager",
        "should_synchronize_after_execute stage synchronize_staging close",
    ),
    "Lightning's CheckpointIO": (
        "lightning.pytorch.plugins",
        "CheckpointIO",
        "save_checkpoint load_checkpoint remove_checkpoint teardown",
    ),
}
"""The whole interfaces that classes of Holdfast implement: a new member has to be looked at."""


@pytest.mark.parametrize("title", INTERFACES)
def test_an_interface_has_the_members_that_are_implemented(title: str) -> None:
    module, name, known = INTERFACES[title]
    pytest.importorskip(module.partition(".")[0], reason=f"{module} cannot be had here")
    interface = public(module, name)()
    assert {name for name, _ in members(interface)} | classmethods(interface) == {*known.split()}


def classmethods(kind: type) -> set[str]:
    methods = {name for name, value in vars(kind).items() if isinstance(value, classmethod)}
    return {name for name in methods if not name.startswith("_")}


OVERRIDES = {
    "HoldfastWriter": (DCP, "StorageWriter", "holdfast.interop.dcp", "HoldfastWriter"),
    "HoldfastReader": (DCP, "StorageReader", "holdfast.interop.dcp", "HoldfastReader"),
    "the Trainer's callback": (
        "transformers",
        "TrainerCallback",
        "holdfast.interop.trainers.transformers",
        "_Callback",
    ),
    "torchtitan's manager": (
        "torchtitan.components.checkpointer.base",
        "BaseCheckpointManager",
        "holdfast.interop.trainers.torchtitan",
        "HoldfastCheckpointManager",
    ),
    "Lightning's callback": (
        "lightning.pytorch",
        "Callback",
        "holdfast.interop.trainers.lightning",
        "HoldfastCallback",
    ),
    "Lightning's files": (
        "lightning.pytorch.plugins",
        "CheckpointIO",
        "holdfast.interop.trainers.lightning",
        "HoldfastCheckpointIO",
    ),
}


@pytest.mark.parametrize("title", OVERRIDES)
def test_an_overridden_method_takes_what_the_original_takes(title: str) -> None:
    module, name, own_module, own_name = OVERRIDES[title]
    pytest.importorskip(module.partition(".")[0], reason=f"{module} cannot be had here")
    original, own = public(module, name)(), public(own_module, own_name)()
    assert not inspect.isabstract(own)
    drift = [
        f"{method}: {parameter}"
        for method, _ in members(own)
        if inspect.isfunction(getattr(original, method, None))
        for parameter in not_taken(getattr(original, method), getattr(own, method))
    ]
    assert drift == []
    overridden = [method for method, _ in members(own) if hasattr(original, method)]
    assert overridden, "no method of it overrides one of the original"


CALLED = {
    "keras.callbacks.OrbaxCheckpoint": "on_train_batch_end on_epoch_end on_train_end",
    "keras.Model": "set_state_tree",
    "accelerate.Accelerator": "prepare save_state load_state register_for_checkpointing",
    "transformers.Trainer": "add_callback train get_train_dataloader",
    "transformers.TrainerCallback": CALLBACK,
}
"""Methods of trainers that the integrations, and the documented ways, call or answer."""


@pytest.mark.parametrize("place", CALLED)
def test_what_is_called_is_there(place: str) -> None:
    module, _, name = place.rpartition(".")
    pytest.importorskip(module.partition(".")[0], reason=f"{module} cannot be had here")
    kind = public(module, name)()
    assert [each for each in CALLED[place].split() if not callable(getattr(kind, each, None))] == []


def test_what_keras_calls_of_its_checkpointer_is_there() -> None:
    pytest.importorskip("keras", reason="Keras cannot be had here")
    from holdfast.interop.orbax.v1.training import Checkpointer

    source = inspect.getsource(inspect.getmodule(public("keras.callbacks", "OrbaxCheckpoint")()))
    methods = set(re.findall(r"self\.checkpointer\.(\w+)\(", source))
    assert "save_checkpointables" in methods
    assert [name for name in methods if not hasattr(Checkpointer, name)] == []


def test_what_tunix_takes_from_orbax_is_there() -> None:
    pytest.importorskip("tunix", reason="Tunix cannot be had here")
    import holdfast.interop.orbax as own

    source = inspect.getsource(importlib.import_module("tunix.sft.checkpoint_manager"))
    names = set(re.findall(r"\bocp\.(\w+(?:\.\w+)*)", source))
    assert "CheckpointManager" in names
    for name in names:
        operator.attrgetter(name)(own)


def test_a_difference_is_found() -> None:
    class Original:
        def save(self, path: str, mode: str) -> None: ...

        def more(self) -> None: ...

    class Own:
        def save(self, path: str) -> None: ...

    found = list(drift_of_class("x", Original, Own))
    assert found == ["x.save: mode is not taken", "x.more: not there"]
