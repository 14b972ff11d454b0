"""Conversion of restored arrays to another dtype, on the host.

Floating-point arrays are converted among each other, and integers among each other. A conversion
that would drop a part of each value (complex to real, float to integer) is refused, and so is one
of PRNG keys, whose data has no meaning as numbers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from holdfast.errors import StructureMismatchError
from holdfast.format.dtypes import numpy_dtype


def can_cast(saved: str, wanted: str) -> bool:
    """Return whether arrays of dtype `saved` may be converted to `wanted`; names of dtypes."""
    kinds = _kind(saved), _kind(wanted)
    return kinds[0] is not None and kinds[0] == kinds[1]


def converted(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Return `array` as `dtype`; floating-point values are rounded, too large ones become infinite.

    Args:
        array: of a dtype for which `can_cast` holds.
        dtype: the dtype to convert to.
        name: the array's path, for the message.

    Raises:
        StructureMismatchError: an integer does not fit `dtype`.
    """
    if _kind(dtype.name) == "integer" and array.size:
        limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        # As Python integers: int4 has no comparison with wider types, uint64 none with int64.
        least, most = int(array.min()), int(array.max())
        if least < int(limits.min) or most > int(limits.max):
            raise StructureMismatchError(
                f"restore {name}: expected integers that fit {dtype.name}, found "
                f"{array.dtype.name} from {least} to {most}; restore it as {array.dtype.name}"
            )
    with np.errstate(over="ignore", invalid="ignore"):
        if array.itemsize == dtype.itemsize == 1 and array.dtype != dtype:
            # ml_dtypes has no conversions between its own small types; the wider one is exact.
            array = array.astype(np.int16 if _kind(dtype.name) == "integer" else np.float32)
        return array.astype(dtype)


def _kind(name: str) -> str | None:
    dtype = numpy_dtype(name)
    if dtype is None or dtype.kind in "bc" or dtype.fields is not None:
        return None
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return "integer"
    return "float"
