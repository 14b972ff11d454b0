"""The names of `orbax.checkpoint.v1.tree`: types of trees, for annotations, and `merge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.tree import merge_trees as merge
from holdfast.interop.orbax.v1.arrays import (
    AbstractArray,
    AbstractScalar,
    AbstractShardedArray,
    Scalar,
)

T = TypeVar("T")


class PyTreeOf(Generic[T]):
    """A tree whose leaves are of the type `T`; for annotations."""


class PyTree:
    """A tree of any leaves; for annotations."""


PyTreeKey = Any
PyTreeKeyPath = tuple[Any, ...]
JsonType = Any
Leaf = jax.Array | np.ndarray | Scalar | str
AbstractLeaf = AbstractArray | AbstractShardedArray | AbstractScalar | str

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.tree")

__all__ = [
    "AbstractLeaf",
    "JsonType",
    "Leaf",
    "PyTree",
    "PyTreeKey",
    "PyTreeKeyPath",
    "PyTreeOf",
    "merge",
]
