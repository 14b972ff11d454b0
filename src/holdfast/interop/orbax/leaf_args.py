"""Define how single leaves are saved and restored: `SaveArgs`, `RestoreArgs` and its kin."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

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
