"""Install Holdfast in MaxText when this folder is on PYTHONPATH.

`holdfast.interop.trainers.maxtext` names the folder.

Python imports `sitecustomize` at its start. This one waits until the program imports MaxText's
module of checkpoints, and then runs the next `sitecustomize` on the path, which it hides.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PATCHED = "maxtext.utils.train_utils"
"""The module of MaxText that creates the checkpoint manager, and imports the others in use."""


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and installs Holdfast afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module("holdfast.interop.trainers.maxtext").install()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds MaxText's module once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with a loader that installs Holdfast; None for others."""
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_next() -> None:
    own = Path(__file__).parent
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != own.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder())
_run_next()
