"""Leaves that belong to no framework: NumPy arrays, Python values, stateful objects."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from holdfast.errors import UnsupportedLeafError
from holdfast.format.dtypes import dtype_name
from holdfast.format.paths import Path, path_name

_VALUE_TYPES = (type(None), bool, int, float, str, bytes)


def is_value(leaf: object) -> bool:
    """Return whether `leaf` is a plain Python value."""
    return type(leaf) in _VALUE_TYPES


def is_numpy(leaf: object) -> TypeGuard[np.ndarray | np.generic]:
    """Return whether `leaf` is a NumPy array or scalar."""
    return isinstance(leaf, np.ndarray | np.generic)


def keeps_state(leaf: object) -> bool:
    """Return whether `leaf` is an object whose state can be read and set."""
    return not isinstance(leaf, type) and (
        _has(leaf, "get_state", "set_state") or _has(leaf, "state_dict", "load_state_dict")
    )


def _has(leaf: object, *names: str) -> bool:
    return all(callable(getattr(leaf, name, None)) for name in names)


def state_of(leaf: object) -> object:
    """Return the state of a stateful object, as Python values."""
    if _has(leaf, "get_state", "set_state"):
        return leaf.get_state()  # type: ignore[attr-defined]
    return leaf.state_dict()  # type: ignore[attr-defined]


def give_state(leaf: object, state: object) -> None:
    """Set the state of a stateful object."""
    if _has(leaf, "get_state", "set_state"):
        leaf.set_state(state)  # type: ignore[attr-defined]
    else:
        leaf.load_state_dict(state)  # type: ignore[attr-defined]


def numpy_dtype_name(leaf: np.ndarray | np.generic, path: Path) -> str:
    """Return the name of a NumPy leaf's dtype.

    Raises:
        UnsupportedLeafError: the dtype cannot be stored (object, structured, datetime, text),
            or the leaf has a mask, which would be lost.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise UnsupportedLeafError(
            f"save {path_name(path)}: a masked NumPy array cannot be saved with its mask; save "
            "its .data and its .mask, or filled()"
        )
    name = dtype_name(leaf.dtype)
    if name is None:
        raise UnsupportedLeafError(
            f"save {path_name(path)}: expected a numeric NumPy dtype, found {leaf.dtype}; convert "
            "it"
        )
    return name


def owned_copy(leaf: np.ndarray | np.generic) -> np.ndarray:
    """Return a copy in C order and little-endian, independent of the caller's later writes."""
    return np.array(leaf, dtype=leaf.dtype.newbyteorder("<"), order="C", copy=True)


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of `array` in C order, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
