"""dtypes: Holdfast's names, the NumPy types, and the names in safetensors headers.

A dtype's name is NumPy's (`float32`) or that of the package ml_dtypes (`bfloat16`, `int4`). A dtype
without a name in safetensors 0.8 is stored as `U8`: one byte per element for types smaller than a
byte, as ml_dtypes holds them in memory; with one more axis, of the item's size, for larger ones.

Two dtypes only PyTorch has, under its names. NumPy holds their elements as records:
`complex32` as its real and imaginary float16, and `float4_e2m1fn_x2` as the byte of two values.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np

_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}

_ML_DTYPES = (
    *("bfloat16", "int1", "uint1", "int2", "uint2", "int4", "uint4"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)

_RECORDS = {
    "complex32": [("real", "<f2"), ("imag", "<f2")],
    "float4_e2m1fn_x2": [("two", "u1")],
}

# All that an agent needs of a dtype: to check the records of a part it loads no ml_dtypes.
_ITEM_SIZES_BYTES = dict.fromkeys(["bool", "int8", "uint8", "float4_e2m1fn_x2", *_ML_DTYPES], 1) | {
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32", "complex32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    "complex128": 16,
}


@functools.cache
def _by_name() -> dict[str, np.dtype]:
    """Return the dtypes by name; NumPy is loaded by the first call, not by the import."""
    import ml_dtypes
    import numpy as np

    records = {name: np.dtype(fields) for name, fields in _RECORDS.items()}
    dtypes = records | {
        n: np.dtype(n) for n in [*_SAFETENSORS, "complex128"] if n not in _ML_DTYPES
    }
    return dtypes | {
        n: np.dtype(getattr(ml_dtypes, n)) for n in _ML_DTYPES if hasattr(ml_dtypes, n)
    }


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype) -> str | None:
    """Return the name of `dtype`, without byte order, or None if Holdfast cannot store it.

    NumPy computes names in Python: for states of many arrays they are kept.
    """
    if dtype.fields is not None:
        return next((name for name in _RECORDS if numpy_dtype(name) == dtype), None)
    return dtype.name if _by_name().get(dtype.name) == dtype.newbyteorder("=") else None


def numpy_dtype(name: str) -> np.dtype | None:
    """Return the NumPy dtype of that name, little-endian in files, or None for an unknown name.

    Args:
        name: as NumPy or ml_dtypes has it (`float32`, `bfloat16`), or PyTorch alone (`complex32`).

    Raises:
        InvalidArgumentError: The installed ml_dtypes is too old for it.
    """
    dtype = _by_name().get(name)
    if dtype is None and is_known(name):
        raise InvalidArgumentError(
            f"dtype {name}: expected an ml_dtypes that has it, found an older one; install a newer "
            "ml_dtypes"
        )
    return dtype


def is_known(name: str) -> bool:
    """Return whether arrays of the dtype of that name can be stored."""
    return name in _ITEM_SIZES_BYTES


def item_size_bytes(name: str) -> int:
    """Return the bytes of one element as stored."""
    size_bytes = _ITEM_SIZES_BYTES.get(name)
    if size_bytes is None:
        raise ValueError(f"unknown dtype {name!r}")
    return size_bytes


def safetensors_dtype(name: str) -> str | None:
    """Return the name of a dtype in safetensors headers; None if safetensors does not have it."""
    return _SAFETENSORS.get(name)


def dtype_of_safetensors(name: str) -> str | None:
    """Return the name of the dtype that safetensors headers call `name`; None: there is none."""
    return next((own for own, theirs in _SAFETENSORS.items() if theirs == name), None)


def safetensors_form(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the (dtype, shape) under which a safetensors header lists a chunk of dtype `name`."""
    form = safetensors_dtype(name)
    if form is not None:
        return form, shape
    size_bytes = item_size_bytes(name)
    return "U8", shape if size_bytes == 1 else (*shape, size_bytes)
