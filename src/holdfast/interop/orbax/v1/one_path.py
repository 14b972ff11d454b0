"""Save and load one checkpoint at one path: `ocp.save_pytree`, `ocp.load_pytree` and their kin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.interop.orbax import handlers
from holdfast.interop.orbax import metadata as metadata_of
from holdfast.interop.orbax.checkpointers import Checkpointer, Located, located
from holdfast.interop.orbax.errors import (
    CheckpointNotFoundError,
    ItemNotFoundError,
    NoCheckpointAtPathError,
)
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.v1 import trees
from holdfast.interop.orbax.v1.context import current
from holdfast.interop.orbax.v1.responses import AsyncResponse, completed
from holdfast.interop.orbax.v1.trees import AUTO, STATE, CheckpointMetadata

PathLike = str | os.PathLike[str]


def save(
    path: PathLike,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Save a pytree at a path; it is durable when this returns.

    Raises:
        InvalidArgumentError: A `ValueError`: the path exists, or the tree cannot be saved.
    """
    save_checkpointables(
        path, {checkpointable_name: state}, overwrite=overwrite, custom_metadata=custom_metadata
    )


def save_checkpointables(
    path: PathLike,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Save checkpointables by name at a path; they are durable when this returns.

    Raises:
        InvalidArgumentError: A `ValueError`: the path exists, or one cannot be saved.
    """
    with Checkpointer(handlers.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path,
            args=trees.save_args(checkpointables),
            force=overwrite,
            custom_metadata=custom_metadata,
        )


def save_async(path: PathLike, state: Any, **options: Any) -> AsyncResponse:
    """Save as `save` does, which has ended when this returns."""
    save(path, state, **options)
    return completed(None)


def save_checkpointables_async(
    path: PathLike, checkpointables: Mapping[str, Any], **options: Any
) -> AsyncResponse:
    """Save as `save_checkpointables` does, which has ended when this returns."""
    save_checkpointables(path, checkpointables, **options)
    return completed(None)


def load(
    path: PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO
) -> Any:
    """Load a pytree, also one that Orbax wrote.

    Args:
        path: The checkpoint, or a step in the directory of a manager.
        abstract_state: Shapes, dtypes, shardings and types of values; None loads it as saved.
        checkpointable_name: The name it was saved under; else the tree that there is.

    Raises:
        NoCheckpointAtPathError: A `ValueError`: there is no checkpoint.
        ItemNotFoundError: A `KeyError`: there is none of this name.
        StructureMismatchError: A `ValueError`: it is not as wanted.
    """
    place = _located(path)
    record = place.reader.step_record(place.step)
    name = place.item or trees.tree_name(record, checkpointable_name)
    is_part = current().pytree.loading.partial_load
    targets = {name: trees.restore_args(abstract_state, is_part=is_part)}
    return place.reader.restore(place.step, targets)[name]


def load_checkpointables(path: PathLike, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Load checkpointables by name: those asked for, or all pytrees as they were saved.

    Raises:
        NoCheckpointAtPathError, ItemNotFoundError, StructureMismatchError: As `load`.
    """
    place = _located(path)
    if isinstance(abstract_checkpointables, CheckpointMetadata):
        abstract_checkpointables = abstract_checkpointables.metadata
    targets = abstract_checkpointables
    if targets is None:
        targets = dict.fromkeys(place.reader.step_record(place.step).items)
    is_part = current().pytree.loading.partial_load
    args = {name: trees.restore_args(target, is_part=is_part) for name, target in targets.items()}
    return place.reader.restore(place.step, args)


def load_async(path: PathLike, abstract_state: Any = None, **options: Any) -> AsyncResponse:
    """Load as `load` does, which has ended when this returns."""
    return completed(load(path, abstract_state, **options))


def load_checkpointables_async(
    path: PathLike, abstract_checkpointables: Any = None
) -> AsyncResponse:
    """Load as `load_checkpointables` does, which has ended when this returns."""
    return completed(load_checkpointables(path, abstract_checkpointables))


def metadata(path: PathLike, checkpointable_name: str | None = AUTO) -> CheckpointMetadata:
    """Return the metadata of a pytree, which `load` takes as `abstract_state`.

    Raises:
        NoCheckpointAtPathError: A `ValueError`: there is no checkpoint.
        ItemNotFoundError: A `KeyError`: there is none of this name.
    """
    overview = checkpointables_metadata(path)
    located_at = _located(path)
    record = located_at.reader.step_record(located_at.step)
    name = located_at.item or trees.tree_name(record, checkpointable_name)
    if name not in overview.metadata:
        raise ItemNotFoundError(
            f"metadata {path}: expected {name!r}, found {', '.join(overview.metadata)}"
        )
    return _replaced(overview, overview.metadata[name])


def _replaced(found: CheckpointMetadata, tree: Any) -> CheckpointMetadata:
    return CheckpointMetadata(
        path=found.path,
        metadata=tree,
        init_timestamp_nsecs=found.init_timestamp_nsecs,
        commit_timestamp_nsecs=found.commit_timestamp_nsecs,
        custom_metadata=found.custom_metadata,
    )


def checkpointables_metadata(path: PathLike) -> CheckpointMetadata:
    """Return the metadata of all checkpointables, by name.

    Raises:
        NoCheckpointAtPathError: A `ValueError`: there is no checkpoint.
    """
    place = _located(path)
    record = place.reader.step_record(place.step)
    described = metadata_of.of_step(record, None)
    return CheckpointMetadata(
        path=path_of(Path(os.fspath(path))),
        metadata=trees.abstract_items(record),
        init_timestamp_nsecs=described.init_timestamp_nsecs,
        commit_timestamp_nsecs=described.commit_timestamp_nsecs,
        custom_metadata=described.custom_metadata,
    )


def is_orbax_checkpoint(path: PathLike) -> bool:
    """Return whether there is a checkpoint at a path that `load` can read."""
    try:
        _located(path)
    except NoCheckpointAtPathError:
        return False
    return True


def _located(path: PathLike) -> Located:
    try:
        return located(Path(os.path.abspath(os.fspath(path))))
    except CheckpointNotFoundError as error:
        raise NoCheckpointAtPathError(f"load {path}: there is no checkpoint") from error
