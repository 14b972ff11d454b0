"""Typed JSON decoding that is safe from any thread.

msgspec inspects a type on its first use. When two threads do that at the same time, one of them
reads the half-built type information of the other and the process ends with a segmentation fault
(msgspec 0.22). So decoders are created here under a lock, once per type.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes | str, kind: type[T]) -> T:
    """Return the value of that type in `data`.

    Raises:
        msgspec.DecodeError: `data` is not JSON.
        msgspec.ValidationError: it is not a value of that type.
        UnicodeDecodeError: a string is not UTF-8.
        RecursionError: it is nested too deep.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    value: T = decoder.decode(data)
    return value
