"""The names of `orbax.checkpoint.v1.path`: paths, and the names of steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.v1.path import step as step

if TYPE_CHECKING:
    Path = Any
else:
    try:
        from etils.epath import Path as Path
    except ImportError:
        from pathlib import Path as Path

PathLike = str | os.PathLike[str]


@runtime_checkable
class PathAwaitingCreation(Protocol):
    """A folder that may not exist yet; `await_creation` waits until it does."""

    def __truediv__(self, other: Any) -> PathAwaitingCreation:
        """Return a path below it."""
        ...

    @property
    def path(self) -> Any:
        """The path."""
        ...

    async def await_creation(self) -> Any:
        """Return the path once it exists."""
        ...


class CreatedPath:
    """A `PathAwaitingCreation` that exists already.

    Args:
        path: The folder.
    """

    def __init__(self, path: Any) -> None:
        self.path = path

    def __truediv__(self, other: Any) -> CreatedPath:
        return CreatedPath(self.path / other)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return str(self.path.name)

    async def await_creation(self) -> Any:
        """Return the path."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.path")
