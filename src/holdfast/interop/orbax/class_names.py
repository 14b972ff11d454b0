"""Give a class the name that programs know it by: Orbax's, where Holdfast has a class of that name.

Each class name of the tree is used once, so such a class is `OrbaxLatestN` in its module, which
exports `LatestN = OrbaxLatestN`. `named` makes its representation, its pickles and the messages of
errors use the exported name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def named(name: str) -> Callable[[Kind], Kind]:
    """Return a decorator that sets the name of a class to `name`, which its module must export."""

    def renamed(kind: Kind) -> Kind:
        kind.__name__ = kind.__qualname__ = name
        return kind

    return renamed
