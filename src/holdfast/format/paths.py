"""Paths of leaves in the state's tree, and the chunk names made from them.

A path is a tuple of keys: a string for a dict key or an attribute, an int for a dict key or the
index in a sequence. A name is the keys joined by `/`, with `%`, `/`, `[` and control characters of
string keys escaped as in URLs, so that the end of the keys and the start of a chunk's index are
unambiguous.
"""

from __future__ import annotations

import re
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]

ROOT_NAME = "."
_ESCAPED = re.compile(r"[%/\[\x00-\x1f\x7f]")


def _segment(key: str | int) -> str:
    if isinstance(key, int):
        return str(key)
    if _ESCAPED.search(key) is None:
        return key
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", key)


def path_name(path: Path) -> str:
    """Return `params/dense/kernel` for ('params', 'dense', 'kernel'); `.` for the root."""
    name = "/".join(map(_segment, path)) or ROOT_NAME
    return "%5F" + name[1:] if name == "__metadata__" else name


def chunk_name(name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> str:
    """Return the name of a chunk: `name[0:512,128:256]`; ranges are half-open."""
    index = ",".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))
    return f"{name}[{index}]"
