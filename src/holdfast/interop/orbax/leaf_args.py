"""Define how single leaves are saved and restored: `SaveArgs`, `RestoreArgs` and its kin."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

PLACEHOLDER = ...
"""Marks a leaf that is not restored."""


@dataclasses.dataclass
class SaveArgs:
    """How a leaf is saved. Only `dtype` has an effect; the others are about Orbax's files."""

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclasses.dataclass
class RestoreArgs:
    """How a leaf is restored: as what type, and with which dtype. None: as saved."""

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How a JAX array is restored. Without a sharding it gets the one it was saved with."""

    restore_type: Any = jax.Array
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Return the arguments that restore each leaf like that of `target`.

    Args:
        target: Arrays, ShapeDtypeStructs and values.
        sharding_tree: Shardings in the same structure. None takes those of `target`.
        set_global_shape: Whether arrays get the shapes of `target`.
        support_layout: Taken for compatibility: the layouts of devices are not stored.
        strict: Whether another shape is an error, rather than a reason to cut or pad.
    """
    del support_layout

    def of_leaf(leaf: Any, sharding: Any) -> RestoreArgs:
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            shape = tuple(leaf.shape) if set_global_shape else None
            return ArrayRestoreArgs(
                dtype=leaf.dtype, sharding=sharding, global_shape=shape, strict=strict
            )
        if isinstance(leaf, np.ndarray | np.generic):
            return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return RestoreArgs(restore_type=type(leaf))

    if sharding_tree is None:
        return jax.tree_util.tree_map(
            lambda leaf: of_leaf(leaf, getattr(leaf, "sharding", None)), target
        )
    return jax.tree_util.tree_map(of_leaf, target, sharding_tree)
