"""Paths of leaves in the state's tree, and the chunk names made from them.

A path is a tuple of keys: a string for a dict key or an attribute, an int for a dict key or the
index in a sequence. A name is the keys joined by `/`, with `%`, `/`, `[` and control characters of
string keys escaped as in URLs, so that the end of the keys and the start of a chunk's index are
unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an array or a value in the saved tree, the outermost first."""

ROOT_NAME = "."
_ESCAPED = re.compile(r"[%/\[\x00-\x1f\x7f]")


def _escaped(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"


def key_order(key: str | int) -> tuple[int, str]:
    """Return a sort key for the keys of a node: ints by value, before strings."""
    return (key, "") if isinstance(key, int) else (1 << 62, key)


@lru_cache(maxsize=4096)
def _key_name(key: str | int) -> str:
    # States have many paths, and few different keys.
    return _ESCAPED.sub(_escaped, key) if isinstance(key, str) else str(key)


def _plain_name(path: Path) -> str:
    return "/".join(map(_key_name, path))


def path_name(path: Path) -> str:
    """Return `params/dense/kernel` for ('params', 'dense', 'kernel'); `.` for the root."""
    name = _plain_name(path) or ROOT_NAME
    return "%5F" + name[1:] if name == "__metadata__" else name


@dataclass(frozen=True, slots=True)
class PathPrefixes:
    """The subtrees at some names, as `path_name` prints them; a prefix ends at a whole key.

    `params` covers `params/w` and `params`, and not `params_ema`. `.` covers the whole tree.
    """

    names: tuple[str, ...]

    def covers(self, path: Path) -> bool:
        """Return whether `path` is at or below one of the prefixes."""
        name = _plain_name(path)
        return any(
            prefix == ROOT_NAME or name == prefix or name.startswith(f"{prefix}/")
            for prefix in map(_plain_prefix, self.names)
        )

    def has_above(self, path: Path) -> bool:
        """Return whether `path` is strictly above one of the prefixes."""
        start = f"{_plain_name(path)}/" if path else ""
        prefixes = (p for p in map(_plain_prefix, self.names) if p != ROOT_NAME)
        return any(prefix.startswith(start) and prefix != start for prefix in prefixes)

    def without_paths(self, paths: Iterable[Path]) -> tuple[str, ...]:
        """Return the prefixes that cover none of `paths`."""
        all_paths = tuple(paths)
        return tuple(
            name
            for name in self.names
            if not any(PathPrefixes((name,)).covers(p) for p in all_paths)
        )


NO_PREFIXES = PathPrefixes(())


def _plain_prefix(name: str) -> str:
    # `path_name` escapes this name only where it is the whole path.
    return "__metadata__" if name == "%5F_metadata__" else name


def chunk_name(name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> str:
    """Return the name of a chunk: `name[0:512,128:256]`; ranges are half-open."""
    index = ",".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))
    return f"{name}[{index}]"
