"""Bit-for-bit comparison of states, by an oracle that shares no code with what is tested."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def same(one: Any, other: Any) -> bool:
    """Whether two pytrees have one structure and leaves of one type, dtype, shape and bits."""
    is_none = lambda x: x is None  # noqa: E731
    left, left_def = jax.tree_util.tree_flatten(one, is_leaf=is_none)
    right, right_def = jax.tree_util.tree_flatten(other, is_leaf=is_none)
    return left_def == right_def and all(map(same_leaf, left, right))


def same_leaf(one: Any, other: Any) -> bool:
    """Whether two leaves are the same."""
    if isinstance(one, jax.Array):
        if not isinstance(other, jax.Array) or one.dtype != other.dtype:
            return False
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            return same_leaf(jax.random.key_data(one), jax.random.key_data(other))
        return same_bits(np.asarray(one), np.asarray(other))
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and same_bits(np.asarray(one), np.asarray(other))
    return type(one) is type(other) and repr(one) == repr(other)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have one shape, dtype and content, NaNs and all."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()
