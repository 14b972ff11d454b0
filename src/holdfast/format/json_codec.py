"""JSON into types, from any thread.

msgspec finds out what it has to know of a type when the type is used first. Where two threads do
that at once, one of them sees what the other has half built, and the process ends with a
segmentation fault (msgspec 0.22). So it is done under a lock here, once for each type.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes | str, kind: type[T]) -> T:
    """The value of that type in `data`.

    Raises:
        msgspec.DecodeError: it is no JSON; msgspec.ValidationError: it is no such value.
        UnicodeDecodeError, RecursionError: likewise.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    value: T = decoder.decode(data)
    return value
