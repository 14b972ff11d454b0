"""Convert between the checkpointables of Orbax's second interface and items of the first.

A checkpointable is a pytree, or an object that a handler writes into a folder, such as an iterator
of Grain. Its abstract form has shapes and dtypes, types of values, or metadata that was read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import item_forms, outlines
from holdfast.interop.orbax import metadata as metadata_of
from holdfast.interop.orbax.errors import ArgumentTypeError
from holdfast.interop.orbax.metadata import LeafMetadata
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.records import DEFAULT_ITEM, ItemRecord, StepRecord
from holdfast.interop.orbax.restore_args import restore_args_as_placed
from holdfast.interop.orbax.v1 import handlers
from holdfast.interop.orbax.v1.context import Context
from holdfast.interop.orbax.v1.errors import InvalidLayoutError
from holdfast.interop.orbax.v1.handlers import (
    FolderHandler,
    HandlerRestore,
    HandlerSave,
    PyTreeHandler,
)
from holdfast.interop.orbax.v1.registry import handler_to_load, handler_to_save

STATE = "state"
AUTO = "AUTO"
RESERVED = ("metrics", AUTO, "_CHECKPOINT_DELETION", "_orbax")

log = logging.getLogger(__name__)


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


def save_args(checkpointables: Mapping[str, Any], context: Context) -> ocp_args.Composite:
    """Return the arguments that save checkpointables.

    Raises:
        InvalidArgumentError: There are none, one is None or empty, or a name is reserved.
        NoEntryError: A `KeyError`: no handler takes one.
    """
    if not isinstance(checkpointables, Mapping) or not checkpointables:
        raise InvalidArgumentError(
            f"save: expected a dict of checkpointables, found {checkpointables!r}"
        )
    arguments: dict[str, ocp_args.CheckpointArgs] = {}
    for name, entry in checkpointables.items():
        _check_name("save", name)
        if entry is None:
            raise InvalidArgumentError(f"save {name}: expected a checkpointable, found None")
        handler = handler_to_save(context.checkpointables.registry, entry, name)
        if not isinstance(handler, PyTreeHandler):
            arguments[name] = HandlerSave(entry, handler)
            continue
        if outlines.is_end(entry):
            raise InvalidArgumentError(f"save {name}: the tree is empty")
        arguments[name] = ocp_args.PyTreeSave(_converted(entry, context))
    return ocp_args.Composite(**arguments)


def check_state(state: Any) -> None:
    """Check that a tree to save has leaves that can be saved.

    Raises:
        InvalidArgumentError: It is None, or a leaf cannot be saved.
    """
    if state is None:
        raise InvalidArgumentError("save: expected a tree, found None")
    for path, leaf in jax.tree_util.tree_flatten_with_path(state, is_leaf=outlines.is_end)[0]:
        if not handlers.is_leaf(leaf):
            raise InvalidArgumentError(
                f"save {jax.tree_util.keystr(path)}: expected an array, a number, a string, bytes "
                f"or None, found {type(leaf).__module__}.{type(leaf).__qualname__}; convert it, or "
                "save it by a handler with save_checkpointables"
            )


def check_abstract(state: Any) -> None:
    """Check that a tree to load has leaves that can be loaded.

    Raises:
        ArgumentTypeError: A `TypeError`: a leaf cannot.
    """
    if isinstance(state, CheckpointMetadata):
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(state, is_leaf=outlines.is_end)[0]:
        if not handlers.is_abstract_leaf(leaf):
            raise ArgumentTypeError(
                f"load {jax.tree_util.keystr(path)}: expected an array, a ShapeDtypeStruct, a "
                f"number or a string, or the type of one, found {type(leaf).__qualname__}"
            )


def check_loaded_name(name: str | None) -> None:
    """Check the name of a tree to load.

    Raises:
        InvalidArgumentError: It is empty or reserved.
    """
    if name not in (None, AUTO):
        _check_name("load", name)


def _check_name(call: str, name: Any) -> None:
    if not isinstance(name, str) or not name or name in RESERVED:
        raise InvalidArgumentError(
            f"{call}: expected a name of a checkpointable, found {name!r}"
            + (", which is reserved" if name in RESERVED else "")
        )


def _converted(tree: Any, context: Context) -> Any:
    """Return a tree whose arrays and numbers have the dtypes that the options give."""
    saving = context.array.saving
    scoped, common = saving.scoped_storage_options_creator, saving.storage_options.dtype
    if scoped is None and common is None:
        return tree

    def of_leaf(path: Any, leaf: Any) -> Any:
        own = None if scoped is None else scoped(path, leaf)
        dtype = common if own is None or own.dtype is None else own.dtype
        if dtype is None:
            return leaf
        if isinstance(leaf, jax.Array | np.ndarray):
            return leaf.astype(dtype)
        return np.asarray(leaf, dtype).item() if type(leaf) in (int, float) else leaf

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def targets_of(given: Any) -> dict[str, Any] | None:
    """Return what to load by name, as a program gives it; None: everything.

    Raises:
        InvalidArgumentError: It is no dict, or a name is reserved.
    """
    if isinstance(given, CheckpointMetadata):
        given = given.metadata
    if given is not None and not isinstance(given, dict):
        raise InvalidArgumentError(
            f"load: expected a dict of what to load by name, found {type(given).__name__}"
        )
    for name in given or {}:
        _check_name("load", name)
    return given or None


def restore_args(
    record: StepRecord, targets: Mapping[str, Any] | None, context: Context
) -> dict[str, Any]:
    """Return the arguments that load checkpointables by name, each like its abstract form.

    Args:
        record: What the checkpoint has.
        targets: Abstract forms; None, as each in it, loads a checkpointable as it was saved.
        context: The options.

    Raises:
        NoEntryError: A `KeyError`: no handler loads one.
    """
    if targets is None:
        targets = dict.fromkeys(record.items)
    arguments: dict[str, Any] = {}
    for name, abstract in targets.items():
        item = record.items.get(name)
        if isinstance(abstract, CheckpointMetadata):
            abstract = abstract.metadata
        if item is not None and item.kind == "folder":
            registry = context.checkpointables.registry
            handler = handler_to_load(registry, abstract, name, item.handler)
            arguments[name] = HandlerRestore(abstract, handler)
        elif abstract is None or (item is not None and item.kind == "json"):
            arguments[name] = None
        else:
            arguments[name] = _tree_args(abstract, context)
    return arguments


def _tree_args(abstract: Any, context: Context) -> Any:
    like = jax.tree_util.tree_map(_like, abstract)
    is_strict = not context.array.loading.enable_padding_and_truncation
    if context.pytree.loading.partial_load:
        args = restore_args_as_placed(like, strict=is_strict)
        return ocp_args.PyTreeRestore(like, restore_args=args, partial_restore=True)
    return ocp_args.StandardRestore(like, strict=is_strict)


def _like(leaf: Any) -> Any:
    if isinstance(leaf, NumpyMetadata):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    if isinstance(leaf, LeafMetadata):
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        )
    known = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, type)
    if isinstance(leaf, known) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    # Any object with a shape and a dtype describes an array: without a sharding, one of NumPy.
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        leaf.shape, leaf.dtype, sharding=sharding
    )


def abstract_items(
    record: StepRecord, files_of: Callable[[str], Mapping[str, bytes]], context: Context
) -> dict[str, Any]:
    """Return the abstract form of each checkpointable; None if its handler gives none.

    Args:
        record: What the checkpoint has.
        files_of: Returns the files of a checkpointable that a handler wrote.
        context: The options.
    """
    items: dict[str, Any] = {}
    for name, item in record.items.items():
        outline = item.outline
        if item.kind == "folder":
            items[name] = _described_by_handler(name, item, files_of, context)
        if outline is None:
            items.setdefault(name, None)
            continue
        tree = metadata_of.of_outline(outline)
        kinds = outlines.built([(leaf.path, leaf.kind) for leaf in outline.leaves])
        items[name] = jax.tree_util.tree_map(
            _abstract, kinds, tree, is_leaf=lambda node: isinstance(node, str)
        )
    return items


def _described_by_handler(
    name: str, item: ItemRecord, files_of: Callable[[str], Mapping[str, bytes]], context: Context
) -> Any:
    registry = context.checkpointables.registry
    try:
        handler = handler_to_load(registry, None, name, item.handler)
        with item_forms.folder_of([files_of(name)]) as folder:
            return FolderHandler().metadata(path_of(folder), handler)
    except (LookupError, NotImplementedError, OSError, TypeError, ValueError) as error:
        log.warning("metadata of %s: its handler gives none: %s", name, error)
        return None


def _abstract(kind: str, described: Any) -> Any:
    if kind in outlines.VALUES:
        return outlines.VALUES[kind]()
    if kind == "numpy":
        fields = {field.name: getattr(described, field.name) for field in FIELDS}
        return NumpyMetadata(**fields)
    return described


FIELDS = dataclasses.fields(LeafMetadata)


def tree_name(record: StepRecord, wanted: str | None, place: object) -> str:
    """Return the name of the tree that is meant: `wanted`, or the first that there is.

    Raises:
        InvalidLayoutError: There is no such tree.
    """
    trees = sorted(name for name, item in record.items.items() if item.kind in ("tree", "array"))
    if wanted is None:
        wanted = DEFAULT_ITEM
    candidates = (STATE, DEFAULT_ITEM, *trees) if wanted == AUTO else (wanted,)
    for name in candidates:
        if name in trees:
            return name
    raise InvalidLayoutError(
        f"load {place}: expected a tree{'' if wanted == AUTO else f' {wanted!r}'}, found "
        f"{', '.join(trees) or 'none'}"
    )
