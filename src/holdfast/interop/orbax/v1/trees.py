"""Convert between trees of Orbax's second interface and those of the first.

The abstract form of a tree has shapes and dtypes, types of values, or metadata that was read.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import metadata as metadata_of
from holdfast.interop.orbax import outlines
from holdfast.interop.orbax.errors import ArgumentTypeError
from holdfast.interop.orbax.leaf_args import RestoreArgs
from holdfast.interop.orbax.metadata import LeafMetadata
from holdfast.interop.orbax.outlines import TreeOutline
from holdfast.interop.orbax.restore_args import restore_args_as_placed
from holdfast.interop.orbax.v1.context import Context


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


def is_leaf(leaf: Any) -> bool:
    """Return whether a value can be a leaf of a saved tree."""
    kinds = (jax.Array, np.ndarray, np.number, np.bool_, int, float, bool, str, bytes)
    return isinstance(leaf, kinds) or outlines.is_end(leaf)


def is_abstract_leaf(leaf: Any) -> bool:
    """Return whether a value can be a leaf of a tree to load."""
    if isinstance(leaf, type):
        return leaf in (int, float, bool, str, bytes, np.ndarray, jax.Array)
    has_form = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return has_form or is_leaf(leaf) or isinstance(leaf, LeafMetadata)


def check_state(state: Any) -> None:
    """Check that a tree to save has leaves that can be saved.

    Raises:
        InvalidArgumentError: It is None, or a leaf cannot be saved.
    """
    if state is None:
        raise InvalidArgumentError("save: expected a tree, found None")
    for path, leaf in jax.tree_util.tree_flatten_with_path(state, is_leaf=outlines.is_end)[0]:
        if not is_leaf(leaf):
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
        if not is_abstract_leaf(leaf):
            raise ArgumentTypeError(
                f"load {jax.tree_util.keystr(path)}: expected an array, a ShapeDtypeStruct, a "
                f"number or a string, or the type of one, found {type(leaf).__qualname__}"
            )


def converted(tree: Any, context: Context) -> Any:
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


def tree_args(abstract: Any, context: Context) -> Any:
    """Return the arguments that restore a tree like its abstract form."""
    like = jax.tree_util.tree_map(_like, abstract)
    is_strict = not context.array.loading.enable_padding_and_truncation
    if context.pytree.loading.partial_load:
        args = restore_args_as_placed(like, strict=is_strict)
        return ocp_args.PyTreeRestore(like, restore_args=args, partial_restore=True)
    return ocp_args.StandardRestore(jax.tree_util.tree_map(_shapeless, like), strict=is_strict)


def _shapeless(leaf: Any) -> Any:
    """Return what restores a NumPy array as in Orbax: by its dtype, with the shape it has."""
    if isinstance(leaf, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return leaf


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


def abstract_tree(outline: TreeOutline) -> Any:
    """Return the abstract form of a tree."""
    tree = metadata_of.of_outline(outline)
    kinds = outlines.built([(leaf.path, leaf.kind) for leaf in outline.leaves])
    return jax.tree_util.tree_map(
        _abstract, kinds, tree, is_leaf=lambda node: isinstance(node, str)
    )


def _abstract(kind: str, described: Any) -> Any:
    if kind in outlines.VALUES:
        return outlines.VALUES[kind]()
    if kind == "numpy":
        fields = {field.name: getattr(described, field.name) for field in FIELDS}
        return NumpyMetadata(**fields)
    return described


FIELDS = dataclasses.fields(LeafMetadata)
