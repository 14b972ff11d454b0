"""The manifests in a run's directory, by the names of their checkpoints."""

from __future__ import annotations

from pathlib import Path

from holdfast.format.names import manifest_key
from tests.attempts import checkpoint_id


def manifest_path(run: Path, step: int, attempt: int = 1) -> Path:
    """Return where a checkpoint's manifest is; a path at which nothing is if it has none."""
    name = manifest_key(checkpoint_id(step, attempt))
    found = [*run.glob(f"{name.rpartition('-')[0]}-*.json")]
    assert len(found) <= 1, found
    return found[0] if found else run / name


def manifests(run: Path) -> dict[str, Path]:
    """Return all manifests; keys as `000000120.3`, without the attempt's token."""
    found = [*(run / "checkpoints" / "manifests").glob("[0-9]*.json")]
    by_name = {path.stem.split("-")[1]: path for path in found}
    assert len(by_name) == len(found), found
    return by_name


def folders(run: Path) -> set[str]:
    """Return the names of the checkpoints' folders, committed or not, as `000000120.3`."""
    found = {path.name for path in (run / "checkpoints").iterdir()} - {"manifests"}
    names = {name.partition("-")[0] for name in found}
    assert len(names) == len(found), found
    return names
