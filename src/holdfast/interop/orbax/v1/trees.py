"""Convert between the checkpointables of Orbax's second interface and items of the first.

A checkpointable is a pytree, or an object with `get_state` and `set_state`, such as an iterator of
Grain. Its abstract form has shapes and dtypes, types of values, or metadata that was read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import metadata as metadata_of
from holdfast.interop.orbax import outlines
from holdfast.interop.orbax.metadata import LeafMetadata
from holdfast.interop.orbax.records import DEFAULT_ITEM, StepRecord
from holdfast.interop.orbax.restore_args import restore_args_as_placed

STATE = "state"
AUTO = "AUTO"


class NumpyMetadata(LeafMetadata):
    """A NumPy array."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """One checkpoint: `metadata` is an abstract tree, or one by the name of each checkpointable."""

    path: Any
    metadata: Any
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None

    @property
    def init_timestamp(self) -> datetime | None:
        """When the save began."""
        return _time(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime | None:
        """When it was saved."""
        return _time(self.commit_timestamp_nsecs)


def _time(nsecs: int | None) -> datetime | None:
    return None if nsecs is None else datetime.fromtimestamp(nsecs / 1e9, tz=UTC)


class StateHandler:
    """Writes what `get_state` of an object returns, and gives it to `set_state`."""

    def save(self, directory: Any, args: StateSave) -> None:
        """Write the state of this process."""
        state = args.item.get_state()
        data = state if isinstance(state, bytes) else json.dumps(state).encode()
        name = "state.bytes" if isinstance(state, bytes) else "state.json"
        (Path(directory) / f"process_{jax.process_index()}.{name}").write_bytes(data)

    def restore(self, directory: Any, args: StateRestore) -> Any:
        """Set the state of this process, and return the object."""
        own = f"process_{jax.process_index()}.state."
        files = [file for file in Path(directory).iterdir() if file.name.startswith(own)]
        if len(files) != 1:
            raise InvalidArgumentError(
                f"load: expected the state of process {jax.process_index()}, found none; another "
                "number of processes saved it"
            )
        data = files[0].read_bytes()
        args.item.set_state(data if files[0].suffix == ".bytes" else json.loads(data))
        return args.item


@ocp_args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp_args.CheckpointArgs):
    """Save the state of an object."""

    item: Any


@ocp_args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp_args.CheckpointArgs):
    """Restore the state of an object in place."""

    item: Any


def has_state(checkpointable: Any) -> bool:
    """Return whether an object has a state of its own."""
    return all(callable(getattr(checkpointable, name, None)) for name in ("get_state", "set_state"))


def save_args(checkpointables: Mapping[str, Any]) -> ocp_args.Composite:
    """Return the arguments that save checkpointables.

    Raises:
        InvalidArgumentError: There are none.
    """
    if not isinstance(checkpointables, Mapping) or not checkpointables:
        raise InvalidArgumentError(
            f"save: expected a dict of checkpointables, found {checkpointables!r}"
        )
    return ocp_args.Composite(
        **{
            name: StateSave(entry) if has_state(entry) else ocp_args.PyTreeSave(entry)
            for name, entry in checkpointables.items()
        }
    )


def restore_args(abstract: Any, *, is_part: bool) -> Any:
    """Return the arguments that load a checkpointable like `abstract`; None as it was saved."""
    if abstract is None:
        return None
    if isinstance(abstract, CheckpointMetadata):
        abstract = abstract.metadata
    if has_state(abstract) and not isinstance(abstract, type):
        return StateRestore(abstract)
    like = jax.tree_util.tree_map(_like, abstract)
    if is_part:
        args = restore_args_as_placed(like)
        return ocp_args.PyTreeRestore(like, restore_args=args, partial_restore=True)
    return ocp_args.StandardRestore(like)


def _like(leaf: Any) -> Any:
    if isinstance(leaf, NumpyMetadata):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    if isinstance(leaf, LeafMetadata):
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        )
    return leaf


def abstract_items(record: StepRecord) -> dict[str, Any]:
    """Return the abstract form of each checkpointable; None for objects with a state."""
    items: dict[str, Any] = {}
    for name, item in record.items.items():
        outline = item.outline
        if outline is None:
            items[name] = None
            continue
        tree = metadata_of.of_outline(outline)
        kinds = outlines.built([(leaf.path, leaf.kind) for leaf in outline.leaves])
        items[name] = jax.tree_util.tree_map(
            _abstract, kinds, tree, is_leaf=lambda node: isinstance(node, str)
        )
    return items


def _abstract(kind: str, described: Any) -> Any:
    if kind in outlines.VALUES:
        return outlines.VALUES[kind]()
    if kind == "numpy":
        fields = {field.name: getattr(described, field.name) for field in FIELDS}
        return NumpyMetadata(**fields)
    return described


FIELDS = dataclasses.fields(LeafMetadata)


def tree_name(record: StepRecord, wanted: str | None) -> str:
    """Return the name of the tree that is meant: `wanted`, or the first that there is.

    Raises:
        InvalidArgumentError: There is no tree.
    """
    if wanted not in (None, AUTO):
        assert wanted is not None
        return wanted
    trees = [name for name, item in record.items.items() if item.kind == "tree"]
    for name in (STATE, "pytree", DEFAULT_ITEM, *trees):
        if name in trees:
            return name
    raise InvalidArgumentError(
        f"load: expected a checkpoint with a tree, found {', '.join(record.items) or 'nothing'}"
    )
