"""The manifests in a run's directory, by the names of their checkpoints."""

from __future__ import annotations

from pathlib import Path

from holdfast.format.names import manifest_key
from tests.attempts import checkpoint_id


def manifest_path(run: Path, step: int, attempt: int = 1) -> Path:
    """Return where a checkpoint's manifest is, or would be."""
    return run / manifest_key(checkpoint_id(step, attempt))


def manifests(run: Path) -> dict[str, Path]:
    """Return all manifests; keys as `000000120.3`."""
    found = (run / "checkpoints" / "manifests").glob("[0-9]*.json")
    return {path.stem.partition("-")[2]: path for path in found}


def folders(run: Path) -> set[str]:
    """Return the names of the checkpoints' folders, committed or not."""
    return {path.name for path in (run / "checkpoints").iterdir()} - {"manifests"}
