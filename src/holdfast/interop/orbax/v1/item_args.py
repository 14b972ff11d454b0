"""Convert between the checkpointables of Orbax's second interface and items of the first.

A checkpointable is a tree (`trees`), or an object that a handler writes into a folder, such as an
iterator of Grain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import item_forms, outlines
from holdfast.interop.orbax.errors import ArgumentTypeError
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.records import DEFAULT_ITEM, ItemRecord, StepRecord
from holdfast.interop.orbax.v1 import trees
from holdfast.interop.orbax.v1.context import Context
from holdfast.interop.orbax.v1.errors import InvalidLayoutError
from holdfast.interop.orbax.v1.handlers import (
    FolderHandler,
    HandlerRestore,
    HandlerSave,
    PyTreeHandler,
)
from holdfast.interop.orbax.v1.registry import handler_to_load, handler_to_save
from holdfast.interop.orbax.v1.trees import CheckpointMetadata

STATE = "state"
STATE_BEFORE_0_12 = "pytree"
"""The name that Orbax gave before 0.12 to a tree saved without one."""
AUTO = "AUTO"
RESERVED = ("metrics", AUTO, "_CHECKPOINT_DELETION", "_orbax")

log = logging.getLogger(__name__)


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
        arguments[name] = ocp_args.PyTreeSave(trees.converted(entry, context))
    return ocp_args.Composite(**arguments)


def check_loaded_name(name: str | None) -> None:
    """Check the name of a tree to load.

    Raises:
        InvalidArgumentError: It is empty or reserved.
    """
    if name not in (None, AUTO):
        _check_name("load", name)


def check_deleted_name(name: Any) -> None:
    """Check the name of a checkpointable to delete; None stands for all.

    Raises:
        ArgumentTypeError: A `TypeError`: it is no string.
        InvalidArgumentError: A `ValueError`: it is empty or reserved.
    """
    if name is None:
        return
    if not isinstance(name, str):
        raise ArgumentTypeError(f"delete: expected a checkpointable_name, found {name!r}")
    _check_name("delete", name)


def _check_name(call: str, name: Any) -> None:
    if not isinstance(name, str) or not name or name in RESERVED:
        raise InvalidArgumentError(
            f"{call}: expected a name of a checkpointable, found {name!r}"
            + (", which is reserved" if name in RESERVED else "")
        )


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
            arguments[name] = trees.tree_args(abstract, context)
    return arguments


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
        else:
            items[name] = None if outline is None else trees.abstract_tree(outline)
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


def name_in(record: StepRecord, name: str) -> str:
    """Return the name in a checkpoint of the tree saved under `name`."""
    is_older = name == STATE and STATE not in record.items and STATE_BEFORE_0_12 in record.items
    return STATE_BEFORE_0_12 if is_older else name


def tree_name(record: StepRecord, wanted: str | None, place: object) -> str:
    """Return the name of the tree that is meant: `wanted`, or the first that there is.

    Raises:
        InvalidLayoutError: There is no such tree.
    """
    names = sorted(name for name, item in record.items.items() if item.kind in ("tree", "array"))
    if wanted is None:
        wanted = DEFAULT_ITEM
    candidates = (STATE, DEFAULT_ITEM, *names) if wanted == AUTO else (wanted,)
    for name in candidates:
        if name in names:
            return name
    raise InvalidLayoutError(
        f"load {place}: expected a tree{'' if wanted == AUTO else f' {wanted!r}'}, found "
        f"{', '.join(names) or 'none'}"
    )
