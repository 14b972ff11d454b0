"""The names of `orbax.checkpoint.v1.arrays`: types of arrays, for annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct

Shape = tuple[int, ...]
DType = np.dtype
Scalar = int | float | np.number | bytes | bool
AbstractScalar = Scalar


class AbstractArray(Protocol):
    """What has a shape and a dtype."""

    shape: Shape | None
    dtype: Any


class AbstractShardedArray(Protocol):
    """What has a shape, a dtype and a sharding."""

    shape: Shape | None
    dtype: Any
    sharding: jax.sharding.Sharding | Any = None


ArrayLike = AbstractArray | AbstractShardedArray

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.arrays")
