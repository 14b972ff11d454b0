"""Read the items of a checkpoint that Orbax wrote; Orbax reads its own files.

Invariant: an array that is read in a sharding is read by each process in its parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import CheckpointDamagedError, InvalidArgumentError, UnsupportedLeafError
from holdfast.interop.orbax import args as own_args
from holdfast.interop.orbax import item_forms, outlines
from holdfast.interop.orbax.item_forms import FolderState
from holdfast.interop.orbax.orbax_directory import (
    JSON_FILE,
    OrbaxItem,
    OrbaxLeaf,
    read_files,
    read_json,
    read_key_kinds,
    read_leaves,
)
from holdfast.interop.orbax.records import ItemRecord
from holdfast.interop.scratch_memory import ScratchMemory, groups, return_free_memory

try:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from etils import epath
except ImportError as error:
    raise InvalidArgumentError(
        f"Orbax's files are read and written by Orbax, which cannot be imported ({error}): "
        "pip install 'holdfast-checkpoint[orbax]'"
    ) from error

_EMPTY: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}
_SHOWN_MAX = 400


def read_item(item: OrbaxItem, folder: Path) -> tuple[Any, ItemRecord]:
    """Return what is saved for an item, and its record; a tree is in a scratch file in `folder`.

    Raises:
        CheckpointDamagedError: It cannot be read.
        OutOfSpaceError, StorageError: `folder` has no room for the tree.
    """
    if item.kind == "tree":
        return _read_tree(item, folder)
    return _read_small_item(item)


def _read_small_item(item: OrbaxItem) -> tuple[Any, ItemRecord]:
    match item.kind:
        case "json":
            value = read_json(item.path / JSON_FILE)
            return item_forms.saved(own_args.JsonSave(value), item.name)
        case "folder":
            return FolderState(read_files(item.path)), ItemRecord(
                kind="folder", handler=item.handler or "another package"
            )
        case "array":
            leaves, _ = read_leaves(item.path)
            restore_args = _restore_args(leaves[0]) if leaves else ocp.RestoreArgs()
            args = ocp.args.ArrayRestore(restore_args=restore_args)
            value = _restore(item.path, ocp.ArrayCheckpointHandler(), args)
            return item_forms.saved(own_args.ArraySave(value), item.name)
        case "key":
            value = _restore(
                item.path, ocp.JaxRandomKeyCheckpointHandler(), ocp.args.JaxRandomKeyRestore()
            )
            return item_forms.saved(own_args.JaxRandomKeySave(value), item.name)
    value = _restore(
        item.path, ocp.NumpyRandomKeyCheckpointHandler(), ocp.args.NumpyRandomKeyRestore()
    )
    return item_forms.saved(own_args.NumpyRandomKeySave(value), item.name)


def _read_tree(item: OrbaxItem, folder: Path) -> tuple[Any, ItemRecord]:
    """Read a tree in groups of leaves; its arrays are in a scratch file in `folder`."""
    record = read_outline(item)
    assert record.outline is not None
    leaves = [leaf for leaf in record.outline.leaves if leaf.kind not in ("none", "empty")]
    memory = ScratchMemory(folder, map(_size_bytes, leaves))
    state: dict[tuple[outlines.Key, ...], Any] = {}
    for group in groups(leaves, _size_bytes):
        like = {leaf.path_keys: _host_form(leaf) for leaf in group}
        for path, value in _read_leaves_like(item, record.outline, like).items():
            state[path] = _in_scratch(value, memory)
        return_free_memory()
    return outlines.nested(state), record


def _size_bytes(leaf: outlines.SavedLeaf) -> int:
    """Return the size of an array; 0 for what stays in memory."""
    if leaf.kind not in ("jax", "numpy"):
        return 0
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _host_form(leaf: outlines.SavedLeaf) -> Any:
    """Return what a leaf is read like: arrays of JAX on the host's first device."""
    if leaf.kind not in ("jax", "key"):
        return np.empty(0) if leaf.kind == "numpy" else 0
    is_key = leaf.kind == "key"
    dtype: Any = jax.random.key(0, impl=leaf.dtype).dtype if is_key else np.dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        leaf.shape, dtype, sharding=jax.sharding.SingleDeviceSharding(_host_device())
    )


def _in_scratch(value: Any, memory: ScratchMemory) -> Any:
    is_key = isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    if is_key or not isinstance(value, jax.Array | np.ndarray):
        return value
    held = memory.array(value.shape, np.dtype(value.dtype))
    held[...] = np.asarray(value)
    return array_over(held)


def array_over(array: np.ndarray) -> Any:
    """Return an array of JAX on the host, in the memory of `array` if that is possible."""
    return jax.device_put(array, _host_device(), may_alias=True)


def _host_device() -> Any:
    return jax.local_devices(backend="cpu")[0]


def _restore_args(leaf: OrbaxLeaf) -> Any:
    if leaf.value_type in _EMPTY:
        return _EMPTY[leaf.value_type]
    if leaf.value_type == "jax.Array":
        return ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(_host_device()))
    if leaf.value_type == "np.ndarray":
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if leaf.value_type in ("scalar", "string"):
        return ocp.RestoreArgs()
    raise UnsupportedLeafError(
        f"read {outlines.shown(leaf.path)}: expected an array, a number or a string, found "
        f"{leaf.value_type}, which another package registered with Orbax"
    )


def _restore(path: Path, handler: Any, args: Any) -> Any:
    """Return what Orbax reads from `path`.

    Raises:
        CheckpointDamagedError: Orbax cannot read it.
    """
    with _translated(path), contextlib.closing(handler):
        return handler.restore(epath.Path(path), args=args)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise the errors of Orbax as Holdfast's, and keep its warnings off the terminal."""
    try:
        with _quiet():
            yield
    except Exception as error:
        # Orbax raises the class itself. The file is named by the first error of the chain.
        first: BaseException = error
        while first.__cause__ is not None or first.__context__ is not None:
            first = first.__cause__ or first.__context__ or first
        problem = str(first).partition(" [tensorstore_spec=")[0].partition("\n")[0] or repr(first)
        raise CheckpointDamagedError(
            f"read {path}: expected an item that Orbax can read, found {problem[:_SHOWN_MAX]}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's warnings off the terminal: they are for programs that restore a state."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def read_outline(item: OrbaxItem) -> ItemRecord:
    """Return the record of an item, without reading its arrays.

    Raises:
        CheckpointDamagedError: A file of it is missing or damaged.
        UnsupportedLeafError: A leaf is of a type that another package registered with Orbax.
    """
    match item.kind:
        case "tree" | "array":
            leaves, custom = read_leaves(item.path)
            outline = _outline(item, leaves)
            if item.kind == "array":
                outline = dataclasses.replace(
                    outline, leaves=(dataclasses.replace(outline.leaves[0], path=()),)
                )
            return ItemRecord(kind=item.kind, outline=outline, custom_metadata=custom)
        case "key":
            return _read_small_item(item)[1]
        case "folder":
            return ItemRecord(kind="folder", handler=item.handler or "another package")
    return ItemRecord(kind=item.kind)


def _outline(item: OrbaxItem, leaves: list[OrbaxLeaf]) -> outlines.TreeOutline:
    with _translated(item.path), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        metadata = handler.metadata(epath.Path(item.path))
    tree = getattr(metadata, "tree", metadata)
    described = {
        leaf.name: leaf
        for leaf in jax.tree_util.tree_leaves(tree, is_leaf=lambda node: hasattr(node, "dtype"))
        if hasattr(leaf, "name")
    }
    key_kinds = read_key_kinds(item.path)
    shardings: list[Any] = []
    saved = []
    for leaf in leaves:
        name = ".".join(str(entry.key) for entry in leaf.path)
        kind, shape, dtype = _leaf_form(leaf, described.get(name), key_kinds.get(name), item.path)
        index = None
        if kind in ("jax", "key") and leaf.sharding is not None:
            if leaf.sharding not in shardings:
                shardings.append(leaf.sharding)
            index = shardings.index(leaf.sharding)
        saved.append(
            outlines.SavedLeaf(path=leaf.path, kind=kind, shape=shape, dtype=dtype, sharding=index)
        )
    return outlines.TreeOutline(leaves=tuple(saved), shardings=tuple(shardings))


def _leaf_form(
    leaf: OrbaxLeaf, described: Any, key_kind: str | None, folder: Path
) -> tuple[str, tuple[int, ...], str]:
    """Return the kind, the shape and the dtype of a leaf as `SavedLeaf` has them."""
    if leaf.value_type in ("None", "NamedTuple"):
        return "none", (), outlines.NODE
    if leaf.value_type in _EMPTY:
        return "empty", (), leaf.value_type.lower()
    if leaf.value_type == "string":
        return "str", (), ""
    _restore_args(leaf)
    if described is None or described.dtype is None:
        raise CheckpointDamagedError(
            f"read {folder}: expected the array {outlines.shown(leaf.path)}, found none"
        )
    if leaf.value_type == "scalar":
        kinds = {"b": "bool", "i": "int", "u": "int", "f": "float"}
        return kinds[np.dtype(described.dtype).kind], (), ""
    shape = tuple(described.shape)
    if leaf.value_type == "np.ndarray":
        return "numpy", shape, np.dtype(described.dtype).name
    if key_kind is not None:
        return "key", shape[:-1], key_kind
    return "jax", shape, np.dtype(described.dtype).name


def read_like(
    item: OrbaxItem, record: ItemRecord, like: Mapping[tuple[outlines.Key, ...], Any]
) -> dict[tuple[outlines.Key, ...], Any]:
    """Return leaves of an item, each like the one in `like` at its path.

    Raises:
        CheckpointDamagedError: A file of it is missing or damaged.
    """
    if item.kind == "tree":
        assert record.outline is not None
        return _read_leaves_like(item, record.outline, like) if like else {}
    if item.kind == "array":
        args = ocp.args.ArrayRestore(restore_args=_args_like(like[()]))
        return {(): _restore(item.path, ocp.ArrayCheckpointHandler(), args)}
    value, _ = _read_small_item(item)
    values = {}
    for path in like:
        leaf = value
        for key in path:
            leaf = leaf[key]
        values[path] = leaf
    return values


def _read_leaves_like(
    item: OrbaxItem,
    outline: outlines.TreeOutline,
    like: Mapping[tuple[outlines.Key, ...], Any],
) -> dict[tuple[outlines.Key, ...], Any]:
    items, args = [], []
    for leaf in outline.leaves:
        if leaf.kind in ("none", "empty"):
            empty = None if leaf.kind == "none" else type(outlines.EMPTY[leaf.dtype])()
            items.append((leaf.path, empty))
            args.append((leaf.path, empty))
            continue
        target = like.get(leaf.path_keys, ...)
        items.append((leaf.path, ocp.PLACEHOLDER if target is ... else 0))
        args.append((leaf.path, ocp.RestoreArgs() if target is ... else _args_like(target)))
    # With `partial_restore` Orbax would read the leaves in place of the placeholders too.
    arguments = ocp.args.PyTreeRestore(
        item=outlines.built(items), restore_args=outlines.built(args)
    )
    tree = _restore(item.path, ocp.PyTreeCheckpointHandler(), arguments)
    read = {tuple(e.key for e in path): leaf for path, leaf in outlines.flattened(tree)[0]}
    return {path: read[path] for path in like if path in read}


def _args_like(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return ocp.ArrayRestoreArgs(sharding=leaf.sharding)
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape
        )
    if isinstance(leaf, np.ndarray):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.RestoreArgs()
