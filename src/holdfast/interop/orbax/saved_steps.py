"""List steps of a directory without a manager: `ocp.utils` and `ocp.path.step`."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.interop.orbax.run_reader import RunReader


def checkpoint_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps that can be restored from a program's directory."""
    return RunReader(Path(os.fspath(directory))).steps()


def any_checkpoint_step(directory: str | os.PathLike[str]) -> int | None:
    """Return one of the steps; None if there is none."""
    return next(iter(checkpoint_steps(directory)), None)
