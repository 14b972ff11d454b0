"""Restore a saved tree as a program asks for it: the types, dtypes, shapes and shardings.

A restore has two halves: `TreeRestore.wanted` is what Holdfast has to read, and
`TreeRestore.finish` makes the tree of what it has read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError, StructureMismatchError
from holdfast.interop.orbax import outlines
from holdfast.interop.orbax.args import PyTreeRestore, StandardRestore
from holdfast.interop.orbax.leaf_args import PLACEHOLDER, RestoreArgs
from holdfast.interop.orbax.metadata import LeafMetadata, TreeMetadata
from holdfast.interop.orbax.outlines import Key, SavedLeaf, TreeOutline, TreePath

DIFFERENCES_SHOWN_MAX = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How one leaf is restored. `kind` is None (as saved), `jax`, `numpy` or a value's type."""

    kind: str | type | None = None
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    sharding: Any = None
    strict: bool = True


AS_SAVED = Wanted()
TYPES: dict[Any, str | type] = {
    jax.Array: "jax",
    np.ndarray: "numpy",
    **{kind: kind for kind in outlines.VALUES.values()},
}
"""The types that a program may give for a leaf, to get it with the shape and dtype it was saved."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafRestore:
    """One leaf to restore: what was saved, and what is wanted; `fixed` needs no reading."""

    saved: SavedLeaf | None
    wanted: Wanted
    fixed: Any = None


class TreeRestore:
    """The restore of one tree.

    Args:
        outline: The tree as it was saved.
        given: What the program wants.

    Raises:
        StructureMismatchError: The tree wanted is not the saved one.
    """

    def __init__(self, outline: TreeOutline, given: StandardRestore | PyTreeRestore) -> None:
        self._outline = outline
        self._treedef: Any = None
        if isinstance(given, StandardRestore):
            fallback = given.fallback_sharding
            self._leaves = self._like(given.item, lambda leaf, path: _of_leaf(leaf, path, given))
            self._fallback = fallback
            return
        self._fallback = None
        _check_transforms(given)
        is_part = given.partial_restore or given.transforms is not None
        restore_args = given.restore_args
        by_path = {} if restore_args is None else _by_path(restore_args)

        def of_path(leaf: Any, path: TreePath) -> Wanted | None:
            if leaf is PLACEHOLDER:
                return None
            return _of_restore_args(by_path.get(_matched(path)), path)

        if given.item is None and restore_args is not None:
            self._leaves = self._like(restore_args, of_path, is_part=is_part)
        else:
            self._leaves = self._like(given.item, of_path, is_part=is_part)

    def _like(self, item: Any, wanted: Any, is_part: bool = False) -> list[LeafRestore]:
        saved = {_matched(leaf.path): leaf for leaf in self._outline.leaves}
        if item is None:
            return [
                LeafRestore(saved=leaf, wanted=wanted(None, leaf.path) or AS_SAVED)
                for leaf in self._outline.leaves
            ]
        if isinstance(item, TreeMetadata):
            item = item.tree
        with_paths, self._treedef = outlines.flattened(item)
        _check_structure(with_paths, saved, is_part=is_part)
        restores = []
        for path, leaf in with_paths:
            target = None if leaf is None or outlines.is_end(leaf) else wanted(leaf, path)
            if target is None:
                restores.append(LeafRestore(saved=None, wanted=AS_SAVED, fixed=leaf))
            else:
                restores.append(LeafRestore(saved=saved[_matched(path)], wanted=target))
        return restores

    @property
    def wanted(self) -> dict[tuple[Key, ...], Any]:
        """What Holdfast has to read: a leaf like each one, by path."""
        targets = {}
        for restore in self._leaves:
            if restore.saved is not None and restore.saved.kind != "empty":
                targets[restore.saved.path_keys] = self._read_like(restore.saved, restore.wanted)
        return targets

    def _read_like(self, saved: SavedLeaf, wanted: Wanted) -> Any:
        _check_shape(saved, wanted)
        if saved.kind in outlines.VALUES:
            return outlines.VALUES[saved.kind]()
        if saved.kind == "none":
            return None
        if saved.kind == "key":
            dtype: Any = jax.random.key(0, impl=saved.dtype).dtype
            return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                saved.shape, dtype, sharding=self._sharding(saved, wanted)
            )
        dtype = np.dtype(saved.dtype)
        if not _is_read_by_devices(saved, wanted):
            return np.broadcast_to(np.zeros((), dtype), saved.shape)
        if wanted.dtype is not None and _both_floating(dtype, wanted.dtype):
            dtype = np.dtype(wanted.dtype)
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            saved.shape, dtype, sharding=self._sharding(saved, wanted)
        )

    def _sharding(self, saved: SavedLeaf, wanted: Wanted) -> Any:
        if wanted.sharding is not None:
            return wanted.sharding
        if saved.sharding is None:
            return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        try:
            return self._outline.sharding(saved)
        except InvalidArgumentError:
            if self._fallback is None:
                raise
            return self._fallback

    def finish(self, read: dict[tuple[Key, ...], Any]) -> Any:
        """Return the tree, made of the leaves that were read, by path."""
        values = [
            restore.fixed
            if restore.saved is None
            else self._made(restore.saved, restore.wanted, read.get(restore.saved.path_keys))
            for restore in self._leaves
        ]
        if self._treedef is not None:
            return jax.tree_util.tree_unflatten(self._treedef, values)
        return outlines.built(
            [(leaf.path, value) for leaf, value in zip(self._outline.leaves, values, strict=True)]
        )

    def _made(self, saved: SavedLeaf, wanted: Wanted, value: Any) -> Any:
        if saved.kind == "empty":
            return type(outlines.EMPTY[saved.dtype])()
        kind = wanted.kind or saved.kind
        if wanted.kind is None and wanted.shape is not None and saved.kind in outlines.NUMBERS:
            # A shape without a sharding, as of metadata, asks for an array.
            kind = "numpy"
        if isinstance(kind, type):
            return _scalar(saved, kind, value)
        if saved.kind in ("none", "str", "bytes", "key") or kind in outlines.VALUES:
            return value
        if wanted.shape is not None and wanted.shape != saved.shape:
            value = _fitted(np.asarray(value), wanted.shape)
        if not isinstance(value, jax.Array):
            value = np.asarray(value, saved.dtype or None)
        if wanted.dtype is not None and value.dtype != wanted.dtype:
            value = value.astype(wanted.dtype)
        if kind == "numpy":
            return np.asarray(value)
        if isinstance(value, jax.Array):
            return value
        array = np.asarray(value)
        sharding = self._sharding(saved, wanted)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _is_read_by_devices(saved: SavedLeaf, wanted: Wanted) -> bool:
    """Return whether the array is read in its sharding, rather than whole by each process."""
    is_same_shape = wanted.shape is None or wanted.shape == saved.shape
    return saved.kind == "jax" and wanted.kind in (None, "jax") and is_same_shape


def _both_floating(one: Any, other: Any) -> bool:
    return bool(jax.numpy.issubdtype(one, np.floating) and jax.numpy.issubdtype(other, np.floating))


def _matched(path: TreePath) -> tuple[tuple[bool, str], ...]:
    return tuple(entry.matched for entry in path)


def _by_path(tree: Any) -> dict[Any, Any]:
    return {_matched(path): leaf for path, leaf in outlines.flattened(tree)[0]}


def _of_leaf(leaf: Any, path: TreePath, given: StandardRestore) -> Wanted | None:
    strict = given.strict
    if leaf is None and given.item is None:
        return AS_SAVED
    if leaf is PLACEHOLDER:
        return None
    if isinstance(leaf, LeafMetadata):
        return AS_SAVED
    if isinstance(leaf, RestoreArgs):
        return _of_restore_args(leaf, path)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = leaf.sharding
        kind = None if sharding is None else "jax"
        shape = tuple(leaf.shape)
        return Wanted(kind=kind, dtype=leaf.dtype, shape=shape, sharding=sharding, strict=strict)
    if isinstance(leaf, np.ndarray):
        return Wanted(kind="numpy", dtype=leaf.dtype, shape=leaf.shape, strict=strict)
    if isinstance(leaf, np.generic) or type(leaf) in outlines.VALUES.values():
        return Wanted(kind=type(leaf))
    if isinstance(leaf, type) and leaf in TYPES:
        return Wanted(kind=TYPES[leaf])
    raise InvalidArgumentError(
        f"restore {outlines.shown(path)}: expected an array, a jax.ShapeDtypeStruct or a value, "
        f"found {type(leaf).__module__}.{type(leaf).__qualname__}"
    )


def _of_restore_args(given: Any, path: TreePath) -> Wanted:
    """Return what `RestoreArgs`, ours or Orbax's, ask for."""
    if given is None:
        return AS_SAVED
    if not isinstance(given, RestoreArgs) and not hasattr(given, "restore_type"):
        raise InvalidArgumentError(
            f"restore {outlines.shown(path)}: expected RestoreArgs, found {type(given).__name__}"
        )
    restore_type = given.restore_type
    kind = TYPES.get(restore_type, restore_type)
    sharding = getattr(given, "sharding", None)
    if sharding is None and getattr(given, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(given.mesh, given.mesh_axes)
    shape = getattr(given, "global_shape", None) or getattr(given, "shape", None)
    return Wanted(
        kind=kind,
        dtype=given.dtype,
        shape=None if shape is None else tuple(shape),
        sharding=sharding,
        strict=getattr(given, "strict", True),
    )


def _check_transforms(given: PyTreeRestore) -> None:
    if given.transforms or given.legacy_transform_fn is not None:
        raise InvalidArgumentError(
            "PyTreeRestore(transforms=...): transformations are not supported; restore the saved "
            "tree and change it, or pass transforms={} for a part of it"
        )


def _check_shape(saved: SavedLeaf, wanted: Wanted) -> None:
    if not saved.is_array or wanted.shape is None:
        return
    if wanted.shape in (saved.shape, saved.stored_shape):
        return
    if wanted.strict or len(wanted.shape) != len(saved.shape):
        raise StructureMismatchError(
            f"restore {outlines.shown(saved.path)}: expected the shape {wanted.shape}, found "
            f"{saved.shape}; ask for this shape"
            + (
                ", or cut or pad it with strict=False of args.StandardRestore or ArrayRestoreArgs"
                if len(wanted.shape) == len(saved.shape)
                else ""
            )
        )


def _check_structure(
    with_paths: Sequence[tuple[TreePath, Any]], saved: dict[Any, SavedLeaf], is_part: bool
) -> None:
    """Check that the tree wanted has the leaves that were saved; with `is_part`, some of them."""
    tree_leaves = {_matched(path): (path, leaf) for path, leaf in with_paths}
    differences = []
    for at, (path, leaf) in tree_leaves.items():
        if at not in saved and leaf is not PLACEHOLDER and not outlines.is_empty_tuple(leaf):
            differences.append(f"{outlines.shown(path)}: expected a leaf, found nothing")
        elif at in saved and saved[at].kind == "none" and not outlines.is_end(leaf):
            differences.append(f"{outlines.shown(path)}: expected a leaf, found None")
    if not is_part:
        differences += [
            f"{outlines.shown(leaf.path)}: expected nothing, found {leaf.kind}"
            for at, leaf in saved.items()
            if at not in tree_leaves and (leaf.kind, leaf.dtype) != ("none", outlines.NODE)
        ]
    if differences:
        more = len(differences) - DIFFERENCES_SHOWN_MAX
        raise StructureMismatchError(
            "restore: the structure of the tree wanted is not the saved one (expected is what was "
            "asked for, found is what was saved):\n  "
            + "\n  ".join(differences[:DIFFERENCES_SHOWN_MAX])
            + (f"\n  and {more} more" if more > 0 else "")
        )


def _scalar(saved: SavedLeaf, kind: type, value: Any) -> Any:
    if saved.is_array:
        if np.ndim(value) != 0:
            raise StructureMismatchError(
                f"restore {outlines.shown(saved.path)}: expected a {kind.__name__}, found an array "
                f"of shape {saved.shape}"
            )
        value = np.asarray(value).item()
    is_number = kind in outlines.NUMBERS.values() or issubclass(kind, np.generic)
    if is_number and not isinstance(value, bool | int | float):
        raise StructureMismatchError(
            f"restore {outlines.shown(saved.path)}: expected a {kind.__name__}, found {saved.kind}"
        )
    return kind(value)


def _fitted(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `array` cut, or padded with zeros, to `shape`."""
    fitted = np.zeros(shape, array.dtype)
    common = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    fitted[common] = array[common]
    return fitted
