"""Return paths as programs for Orbax expect them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def path_of(path: Path) -> Any:
    """Return `path` as a path of etils, if that is installed."""
    try:
        from etils import epath
    except ImportError:
        return path
    return epath.Path(path)
