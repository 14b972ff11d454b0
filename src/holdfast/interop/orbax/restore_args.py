"""Make the arguments that restore each leaf of a tree, from arrays, values or metadata."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from holdfast.interop.orbax.leaf_args import ArrayRestoreArgs, RestoreArgs
from holdfast.interop.orbax.metadata import LeafMetadata, ScalarMetadata, StringMetadata
from holdfast.interop.orbax.tree import with_key_data

PYTHON_TYPES = {"b": bool, "i": int, "u": int, "f": float}
"""The types of numbers by the kinds of their dtypes."""


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Return the arguments that restore each leaf like that of `target`.

    Args:
        target: Arrays, ShapeDtypeStructs and values, or the metadata of leaves, such as
            `manager.item_metadata(step)`.
        sharding_tree: Shardings in the same structure. None takes those of `target`.
        set_global_shape: Whether arrays get the shapes of `target`.
        support_layout: Taken for compatibility: the layouts of devices are not stored.
        strict: Whether another shape is an error, rather than a reason to cut or pad.

    Returns:
        A tree like `target` of `RestoreArgs`. Arrays without a sharding are restored by NumPy.
    """
    del support_layout

    def of_leaf(leaf: Any, sharding: Any) -> RestoreArgs:
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | LeafMetadata):
            return _of_array(leaf, sharding, set_global_shape, strict)
        if isinstance(leaf, np.ndarray):
            return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return RestoreArgs(restore_type=type(leaf))

    target = with_key_data(target)
    if sharding_tree is None:
        return jax.tree_util.tree_map(
            lambda leaf: of_leaf(leaf, getattr(leaf, "sharding", None)), target
        )
    return jax.tree_util.tree_map(of_leaf, target, sharding_tree)


def _of_array(leaf: Any, sharding: Any, set_global_shape: bool, strict: bool) -> RestoreArgs:
    if isinstance(leaf, StringMetadata):
        return RestoreArgs(restore_type=str)
    if isinstance(leaf, ScalarMetadata):
        return RestoreArgs(restore_type=PYTHON_TYPES[leaf.dtype.kind], dtype=leaf.dtype)
    if sharding is None:
        return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    shape = tuple(leaf.shape) if set_global_shape else None
    return ArrayRestoreArgs(dtype=leaf.dtype, sharding=sharding, global_shape=shape, strict=strict)


def restore_args_as_placed(target: Any, *, strict: bool = True) -> Any:
    """Return the arguments that restore arrays without a sharding in the one they were saved with.

    Other leaves are restored as with `construct_restore_args`; types are restored as such values.
    """

    def of_leaf(leaf: Any) -> RestoreArgs:
        if isinstance(leaf, type):
            return RestoreArgs(restore_type=leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            shape = tuple(leaf.shape)
            return ArrayRestoreArgs(dtype=leaf.dtype, global_shape=shape, strict=strict)
        arguments: RestoreArgs = construct_restore_args(leaf, strict=strict)
        return arguments

    return jax.tree_util.tree_map(of_leaf, target)
