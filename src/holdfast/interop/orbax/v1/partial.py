"""Save a tree in parts to one path: the names of `orbax.checkpoint.v1.partial`.

Each call of `save` adds leaves, in a folder beside the path. `finalize` makes one checkpoint of
all, which is at the path whole or not at all. In between a program may end, and go on later.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import missing_names, outlines
from holdfast.interop.orbax.errors import CheckpointNotFoundError
from holdfast.interop.orbax.v1 import one_path
from holdfast.interop.orbax.v1.errors import FileExistsAtPathError
from holdfast.interop.orbax.v1.responses import AsyncResponse, completed

SUFFIX = ".partial_save"


def save(path: one_path.PathLike, state: Any, *, custom_metadata: Any = None) -> None:
    """Add the leaves of `state` to what `finalize` will put at `path`; they are durable then.

    Raises:
        FileExistsAtPathError: A `FileExistsError`: there is something at `path`.
        InvalidArgumentError: The tree cannot be saved.
    """
    final, parts = _places(path)
    if os.path.lexists(final):
        raise FileExistsAtPathError(
            f"partial.save {final}: expected nothing at this path, found a checkpoint; delete it "
            "first, or give another path"
        )
    number = max((int(part.name) for part in _parts(parts)), default=-1) + 1
    one_path.save(parts / f"{number:06d}", state, custom_metadata=custom_metadata)


def save_async(
    path: one_path.PathLike, state: Any, *, custom_metadata: Any = None
) -> AsyncResponse:
    """Add as `save` does, which has ended when this returns."""
    save(path, state, custom_metadata=custom_metadata)
    return completed(None)


def finalize(path: one_path.PathLike) -> None:
    """Put all leaves that were added at `path`, in one checkpoint.

    Raises:
        FileExistsAtPathError: A `FileExistsError`: there is something at `path`.
        CheckpointNotFoundError: A `FileNotFoundError`: nothing was added.
        InvalidArgumentError: A leaf was added twice. The parts stay.
    """
    final, parts = _places(path)
    if os.path.lexists(final):
        raise FileExistsAtPathError(
            f"partial.finalize {final}: expected nothing at this path, found a checkpoint"
        )
    found = _parts(parts)
    if not found:
        raise CheckpointNotFoundError(f"partial.finalize {final}: nothing was saved to it")
    leaves: dict[outlines.TreePath, Any] = {}
    custom_metadata: dict[str, Any] = {}
    for part in found:
        for leaf_path, leaf in outlines.flattened(one_path.load(part))[0]:
            if leaf_path in leaves:
                raise InvalidArgumentError(
                    f"partial.finalize {final}: expected each leaf once, found "
                    f"{outlines.shown(leaf_path)} twice; a leaf cannot be replaced"
                )
            leaves[leaf_path] = leaf
        custom_metadata |= one_path.metadata(part).custom_metadata or {}
    one_path.save(final, outlines.built([*leaves.items()]), custom_metadata=custom_metadata or None)
    if jax.process_index() == 0:
        shutil.rmtree(parts)


def _places(path: one_path.PathLike) -> tuple[Path, Path]:
    given = Path(os.path.abspath(os.fspath(path)))
    final = given.with_name(given.name.removesuffix(SUFFIX))
    return final, final.with_name(final.name + SUFFIX)


def _parts(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(part for part in folder.iterdir() if part.name.isdigit())


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.partial")
