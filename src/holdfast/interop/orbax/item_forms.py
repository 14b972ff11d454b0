"""Convert items between a program's arguments and what Holdfast saves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holdfast.errors import CheckpointDamagedError, InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import outlines, records
from holdfast.interop.orbax.errors import ArgumentTypeError
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.records import ItemRecord
from holdfast.interop.orbax.tree_restore import TreeRestore

KINDS: dict[str, tuple[type, ...]] = {
    "tree": (ocp_args.StandardRestore, ocp_args.PyTreeRestore),
    "array": (ocp_args.ArrayRestore,),
    "json": (ocp_args.JsonRestore,),
    "key": (ocp_args.JaxRandomKeyRestore,),
    "numpy_random": (ocp_args.NumpyRandomKeyRestore,),
}


AS_STORED = object()
"""Arguments of an item whose files are read, and not given to its handler."""


class FolderState:
    """The files that a foreign handler wrote for one item, as an object with a state."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def get_state(self) -> dict[str, bytes]:
        """Return the bytes of the files by their paths."""
        return self.files

    def set_state(self, state: dict[str, bytes]) -> None:
        """Set the bytes of the files."""
        self.files = state


def saved(given: Any, name: str) -> tuple[Any, ItemRecord]:
    """Return what Holdfast saves for the item `name`, and its record.

    Raises:
        ArgumentTypeError: The arguments are those of a restore.
        InvalidArgumentError: The item cannot be saved.
    """
    match given:
        case ocp_args.StandardSave() | ocp_args.PyTreeSave():
            return _saved_tree(given, name)
        case ocp_args.ArraySave():
            with_path = [((), _array(given, name))]
            outline = outlines.outline_of(with_path)
            return with_path[0][1], ItemRecord(kind="array", outline=outline)
        case ocp_args.JaxRandomKeySave():
            outline = outlines.outline_of([((), given.item)])
            return given.item, ItemRecord(kind="key", outline=outline)
        case ocp_args.JsonSave():
            return records.json_text(given.item, f"the item {name}"), ItemRecord(kind="json")
        case ocp_args.NumpyRandomKeySave():
            return _saved_numpy_random(given.item)
    handler: Any = ocp_args.handler_of(given)
    if handler is None:
        raise ArgumentTypeError(
            f"save {name}: expected arguments to save, such as args.StandardSave(state), found "
            f"args.{type(given).__name__}"
        )
    with tempfile.TemporaryDirectory(prefix="holdfast-item-") as folder:
        handler().save(path_of(Path(folder)), args=given)
        files = {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted(Path(folder).rglob("*"))
            if file.is_file()
        }
    recorded_as = getattr(given, "recorded_as", type(given).__qualname__)
    return FolderState(files), ItemRecord(kind="folder", handler=recorded_as)


def _saved_tree(given: Any, name: str) -> tuple[Any, ItemRecord]:
    tree = given.item
    with_paths, treedef = outlines.flattened(tree)
    if given.save_args is not None:
        args_by_path = dict(outlines.flattened(given.save_args)[0])
        with_paths = [(path, _cast(leaf, args_by_path.get(path))) for path, leaf in with_paths]
        tree = jax.tree_util.tree_unflatten(treedef, [leaf for _, leaf in with_paths])
    dtypes = {}
    if isinstance(given, ocp_args.PyTreeSave):
        # Orbax restores NumPy scalars as Python's numbers, but those of StandardSave as arrays.
        dtypes = {path: leaf.dtype.name for path, leaf in with_paths if _is_numpy_scalar(leaf)}
        with_paths = [(path, leaf.item() if path in dtypes else leaf) for path, leaf in with_paths]
    if dtypes:
        tree = jax.tree_util.tree_unflatten(treedef, [leaf for _, leaf in with_paths])
    if isinstance(given, ocp_args.StandardSave) and with_paths and not with_paths[0][0]:
        if outlines.is_end(with_paths[0][1]):
            raise InvalidArgumentError(f"save {name}: the item is empty")
        raise InvalidArgumentError(
            f"save {name}: expected a tree, found a single {type(tree).__name__}; use "
            "args.ArraySave for one array or number"
        )
    if any(leaf is ... for _, leaf in with_paths):
        raise InvalidArgumentError(f"save {name}: a PLACEHOLDER cannot be saved; take it out")
    outline = outlines.outline_of(with_paths)
    if dtypes:
        leaves = (
            dataclasses.replace(leaf, dtype=dtypes.get(leaf.path, leaf.dtype))
            for leaf in outline.leaves
        )
        outline = dataclasses.replace(outline, leaves=tuple(leaves))
    custom = given.custom_metadata
    return tree, ItemRecord(kind="tree", outline=outline, custom_metadata=custom)


def _is_numpy_scalar(leaf: Any) -> bool:
    return isinstance(leaf, np.integer | np.floating)


def _array(given: Any, name: str) -> Any:
    item = _cast(given.item, given.save_args)
    if not isinstance(item, jax.Array | np.ndarray | np.generic | int | float | bool):
        raise InvalidArgumentError(
            f"save {name}: expected an array or a number, found {type(item).__name__}"
        )
    return item


def _cast(leaf: Any, given: Any) -> Any:
    dtype = getattr(given, "dtype", None)
    if dtype is None or not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
        return leaf
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf.astype(dtype)
    return np.asarray(leaf, dtype)


def _saved_numpy_random(state: Any) -> tuple[Any, ItemRecord]:
    if isinstance(state, tuple):
        name, keys, *rest = state
        return {"name": name, "keys": keys, "rest": list(rest)}, ItemRecord(kind="numpy_random")
    raise InvalidArgumentError(
        f"save: expected the tuple of numpy.random.get_state(), found {type(state).__name__}"
    )


@contextlib.contextmanager
def folder_of(states: Sequence[Mapping[str, bytes]]) -> Iterator[Path]:
    """Return a scratch folder with the files of all processes, by their paths."""
    with tempfile.TemporaryDirectory(prefix="holdfast-item-") as folder:
        for files in states:
            for name, data in files.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        yield Path(folder)


class ItemRestore:
    """The restore of one item: `wanted` is read by Holdfast, and `finish` makes the item of it.

    Args:
        name: The item's name.
        record: The item as it was saved.
        given: The arguments; None restores it as it was saved.

    Raises:
        InvalidArgumentError: The arguments are for another kind of item, or do not fit.
        CheckpointDamagedError: Orbax wrote the item, and it cannot be read.
    """

    def __init__(self, name: str, record: ItemRecord, given: Any) -> None:
        self._name, self.record, self._given = name, record, given
        self._tree: TreeRestore | None = None
        self.wanted: dict[tuple[Any, ...], Any] = {}
        self.is_folder = record.kind == "folder"
        if record.damage is not None:
            raise CheckpointDamagedError(record.damage)
        if self.is_folder:
            if given is AS_STORED:
                return
            if given is None or ocp_args.handler_of(given) is None:
                raise InvalidArgumentError(
                    f"restore {name}: it was saved with {record.handler}; give the arguments with "
                    f"which its handler restores, found {type(given).__name__}"
                )
            return
        if given is not None and not isinstance(given, KINDS[record.kind]):
            expected = " or ".join(f"args.{kind.__name__}" for kind in KINDS[record.kind])
            raise InvalidArgumentError(
                f"restore {name}: expected {expected}, found {type(given).__name__}"
            )
        if record.outline is not None:
            self._tree = TreeRestore(record.outline, self._tree_args())
            self.wanted = self._tree.wanted
        elif record.kind == "json":
            self.wanted = {(): ""}
        else:
            self.wanted = {
                ("name",): "",
                ("keys",): np.empty(624, np.uint32),
                ("rest", 0): 0,
                ("rest", 1): 0,
                ("rest", 2): 0.0,
            }

    @classmethod
    def as_stored(cls, name: str, record: ItemRecord) -> ItemRestore:
        """Return the restore of what an item is stored as, with its files if it has a handler."""
        return cls(name, record, AS_STORED if record.kind == "folder" else None)

    def _tree_args(self) -> Any:
        arguments = self._given
        if isinstance(arguments, ocp_args.ArrayRestore):
            if arguments.restore_args is not None:
                return ocp_args.PyTreeRestore(restore_args=arguments.restore_args)
            return ocp_args.StandardRestore(arguments.item)
        if isinstance(arguments, ocp_args.JaxRandomKeyRestore):
            return ocp_args.PyTreeRestore(restore_args=arguments.restore_args)
        return ocp_args.StandardRestore() if arguments is None else arguments

    def finish(self, read: Mapping[tuple[Any, ...], Any]) -> Any:
        """Return the item, made of the leaves that were read, by path."""
        if self._tree is not None:
            return self._tree.finish(dict(read))
        if self.record.kind == "json":
            return json.loads(read[()])
        rest = (read["rest", 0], read["rest", 1], read["rest", 2])
        return (read["name",], read["keys",], *rest)

    def finish_folder(self, states: Sequence[Mapping[str, bytes]]) -> Any:
        """Return the item that its handler restores from the files of all processes."""
        with folder_of(states) as folder:
            return self.restored_by_handler(folder)

    def restored_by_handler(self, folder: Path) -> Any:
        """Return the item that its handler restores from the files in `folder`."""
        handler: Any = ocp_args.handler_of(self._given)
        return handler().restore(path_of(folder), args=self._given)
