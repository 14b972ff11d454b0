"""Python values as JSON and back, with their types preserved. Never pickle.

None, bool, str, ints of 64 bits and finite floats are stored as themselves and a list as an array.
Any other value is an object with one member that names the type: `{"int": "-0x1f"}`,
`{"float": "nan"}`, `{"bytes": base64}`, `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, and
for the state of iterators `{"array": {"dtype", "shape", "data"}}`, `{"scalar": ...}` for NumPy
arrays and scalars, and `{"tensor": ...}` for tensors. OrderedDicts are restored as dicts and
bytearrays as bytes; other subclasses are refused.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from typing import TypeAlias

import numpy as np

from holdfast.errors import CheckpointDamagedError, UnsupportedLeafError
from holdfast.format.dtypes import dtype_name, numpy_dtype

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

DEPTH_MAX = 100
_INT64 = range(-(2**63), 2**63)


class TensorValue(np.ndarray):
    """A PyTorch tensor inside a value; without PyTorch it is a NumPy array like any other."""


def encode_value(value: object, where: str, depth: int = 0) -> Json:
    """Return `value` as JSON; `where` is its path, for messages.

    Raises:
        UnsupportedLeafError: it is or contains an object of another type, or is nested too deep.
    """
    if depth > DEPTH_MAX:
        raise UnsupportedLeafError(
            f"save {where}: values are nested deeper than {DEPTH_MAX} levels"
        )
    kind = type(value)
    if value is None or kind is bool:
        return value  # type: ignore[return-value]
    if isinstance(value, str) and kind is str:
        return _checked_text(value, where)
    if isinstance(value, int) and kind is int:
        return value if value in _INT64 else {"int": hex(value)}
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes | bytearray) and kind in (bytes, bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = [encode_value(v, f"{where}/{i}", depth + 1) for i, v in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict) and kind in (dict, OrderedDict):
        pairs: list[Json] = [
            [encode_value(k, where, depth + 1), encode_value(v, _below(where, k), depth + 1)]
            for k, v in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value, where)
    raise UnsupportedLeafError(
        f"save {where}: expected an array, a Python value (int, float, bool, str, None, bytes, and "
        "lists, tuples and dicts of them) or an object with get_state/set_state or state_dict/"
        f"load_state_dict, found {kind.__module__}.{kind.__qualname__}; convert it or take it out "
        "of the state"
    )


def _below(where: str, key: object) -> str:
    # Not every key can be formatted: Python refuses ints of thousands of digits.
    is_short = isinstance(key, str) or (isinstance(key, int) and key in _INT64)
    return f"{where}/{key if is_short else type(key).__name__}"


def _checked_text(value: str, where: str) -> str:
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise UnsupportedLeafError(
            f"save {where}: the string holds a lone surrogate, which UTF-8 cannot encode; "
            "save it as bytes"
        )
    return value


def _encode_array(value: np.ndarray | np.generic, where: str) -> Json:
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedLeafError(
            f"save {where}: a masked NumPy array cannot be saved with its mask; save its .data and "
            "its .mask, or filled()"
        )
    array = np.asarray(value)
    name = dtype_name(array.dtype)
    if name is None:
        raise UnsupportedLeafError(
            f"save {where}: NumPy dtype {array.dtype} cannot be stored; convert it"
        )
    stored = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    body: Json = {
        "dtype": name,
        "shape": list(array.shape),
        "data": base64.b64encode(stored.tobytes()).decode(),
    }
    if isinstance(value, TensorValue):
        return {"tensor": body}
    return {"scalar" if isinstance(value, np.generic) else "array": body}


def decode_value(json: Json, depth: int = 0) -> object:
    """Return the value that `encode_value` encoded as `json`.

    Raises:
        CheckpointDamagedError: `json` is not a value in this encoding.
    """
    if depth > DEPTH_MAX:
        raise CheckpointDamagedError(f"read a value: nested deeper than {DEPTH_MAX} levels")
    if isinstance(json, list):
        return [decode_value(item, depth + 1) for item in json]
    if not isinstance(json, dict):
        return json
    try:
        ((kind, body),) = json.items()
        return _decode_tagged(kind, body, depth)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointDamagedError(
            f"read a value: an object of {str(list(json))[:80]} is not an encoded value: {error}"
        ) from error


def _decode_tagged(kind: str, body: Json, depth: int) -> object:
    match kind, body:
        case "int", str():
            return int(body, 16)
        case "float", "nan" | "inf" | "-inf":
            return float(body)
        case "bytes", str():
            return base64.b64decode(body, validate=True)
        case "tuple", list():
            return tuple(decode_value(item, depth + 1) for item in body)
        case "dict", list():
            items = dict(_decode_pair(pair, depth + 1) for pair in body)
            if len(items) != len(body):
                raise ValueError("two of its keys are equal")
            return items
        case "array", dict():
            return _decode_array(body)
        case "tensor", dict():
            return _decode_array(body).view(TensorValue)
        case "scalar", dict():
            return _decode_array(body)[()]
        case _:
            raise ValueError("no such kind of value")


def _decode_pair(pair: Json, depth: int) -> tuple[object, object]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError("a dict's entry is not a pair")
    return decode_value(pair[0], depth), decode_value(pair[1], depth)


def _decode_array(body: dict[str, Json]) -> np.ndarray:
    dtype = numpy_dtype(str(body["dtype"]))
    if dtype is None:
        raise ValueError(f"unknown dtype {body['dtype']!r}")
    data = base64.b64decode(str(body["data"]), validate=True)
    shape = body["shape"]
    if not isinstance(shape, list) or any(type(d) is not int or d < 0 for d in shape):
        raise ValueError("its shape is none")
    # The copy makes the array writable and independent of `data`.
    return np.frombuffer(data, dtype).reshape(shape).copy()  # type: ignore[arg-type]
