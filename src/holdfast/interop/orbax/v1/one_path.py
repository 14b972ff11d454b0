"""Save and load one checkpoint at one path: `ocp.save`, `ocp.load` and their kin.

A path is a checkpoint of Holdfast or of Orbax, a step in the directory of a manager, or, if the
context's layout says so, safetensors files.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import handlers as ocp_handlers
from holdfast.interop.orbax import metadata as metadata_of
from holdfast.interop.orbax.checkpoint_manager import CheckpointManager
from holdfast.interop.orbax.checkpointers import Checkpointer, Located, located
from holdfast.interop.orbax.errors import (
    ArgumentTypeError,
    CheckpointNotFoundError,
    ItemNotFoundError,
)
from holdfast.interop.orbax.old_steps import delete_folder
from holdfast.interop.orbax.orbax_directory import is_checkpoint
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.v1 import item_args, safetensors_files, trees
from holdfast.interop.orbax.v1.context import Context, current
from holdfast.interop.orbax.v1.errors import InvalidLayoutError, UnsupportedLayoutError
from holdfast.interop.orbax.v1.handlers import BackgroundSaveError
from holdfast.interop.orbax.v1.item_args import AUTO, STATE
from holdfast.interop.orbax.v1.options import CheckpointLayout
from holdfast.interop.orbax.v1.responses import AsyncResponse, completed, failed
from holdfast.interop.orbax.v1.trees import CheckpointMetadata

PathLike = str | os.PathLike[str]

log = logging.getLogger(__name__)


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
    trees.check_state(state)
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
        NoEntryError: A `KeyError`: no handler takes one.
    """
    try:
        _save(path, checkpointables, overwrite, custom_metadata)
    except BackgroundSaveError as error:
        raise error.failure from None


def _save(
    path: PathLike, checkpointables: Mapping[str, Any], overwrite: bool, custom_metadata: Any
) -> None:
    context = current()
    if context.checkpoint_layout is CheckpointLayout.SAFETENSORS:
        raise UnsupportedLayoutError(
            "save: safetensors files are only loaded; write them with holdfast export --hf"
        )
    arguments = item_args.save_args(checkpointables, context)
    with Checkpointer(ocp_handlers.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=arguments, force=overwrite, custom_metadata=custom_metadata)
    callback = context.asynchronous.post_finalization_callback
    if callback is not None:
        callback()


def save_async(
    path: PathLike, state: Any, *, checkpointable_name: str = STATE, **options: Any
) -> AsyncResponse:
    """Save as `save` does, which has ended when this returns."""
    trees.check_state(state)
    return save_checkpointables_async(path, {checkpointable_name: state}, **options)


def save_checkpointables_async(
    path: PathLike,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse:
    """Save as `save_checkpointables` does, which has ended when this returns.

    What a handler raises in its background part is raised by the response's `result`.
    """
    try:
        _save(path, checkpointables, overwrite, custom_metadata)
    except BackgroundSaveError as error:
        log.error("save to %s: %s", path, error)
        return failed(error.failure)
    return completed(None)


def load(
    path: PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO
) -> Any:
    """Load a pytree, also one that Orbax wrote.

    Args:
        path: The checkpoint, or a step in the directory of a manager.
        abstract_state: Shapes, dtypes, shardings and types of values; None loads it as saved.
        checkpointable_name: The name it was saved under; None: it has none; else the tree that
            there is.

    Raises:
        InvalidLayoutError: A `ValueError`: there is no checkpoint, or no tree of this name.
        StructureMismatchError: A `ValueError`: it is not as wanted.
        ArgumentTypeError: A `TypeError`: a leaf of `abstract_state` cannot be loaded.
    """
    item_args.check_loaded_name(checkpointable_name)
    trees.check_abstract(abstract_state)
    context = current()
    files = _safetensors(path, context)
    if files is not None:
        return files.load(abstract_state)
    place = _located(path)
    record = place.reader.step_record(place.step)
    name = place.item or item_args.tree_name(record, checkpointable_name, path)
    targets = item_args.restore_args(record, {name: abstract_state}, context)
    return place.reader.restore(place.step, targets)[name]


def load_checkpointables(path: PathLike, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Load checkpointables by name: those asked for, or all as they were saved.

    Raises:
        InvalidLayoutError: A `ValueError`: there is no checkpoint.
        ItemNotFoundError, NoEntryError: A `KeyError`: there is none of a name, or no handler.
        StructureMismatchError: As `load`.
    """
    context = current()
    targets = item_args.targets_of(abstract_checkpointables)
    files = _safetensors(path, context)
    if files is not None:
        return {STATE: files.load((targets or {}).get(STATE))}
    place = _located(path)
    record = place.reader.step_record(place.step)
    return place.reader.restore(place.step, item_args.restore_args(record, targets, context))


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
        InvalidLayoutError: A `ValueError`: there is no checkpoint, or no tree of this name.
    """
    item_args.check_loaded_name(checkpointable_name)
    files = _safetensors(path, current())
    if files is not None:
        tree, custom_metadata = files.metadata()
        return CheckpointMetadata(path=_shown(path), metadata=tree, custom_metadata=custom_metadata)
    overview = checkpointables_metadata(path)
    place = _located(path)
    record = place.reader.step_record(place.step)
    name = place.item or item_args.tree_name(record, checkpointable_name, path)
    return dataclasses.replace(overview, metadata=overview.metadata[name])


def checkpointables_metadata(path: PathLike) -> CheckpointMetadata:
    """Return the metadata of all checkpointables, by name.

    Raises:
        InvalidLayoutError: A `ValueError`: there is no checkpoint.
    """
    context = current()
    files = _safetensors(path, context)
    if files is not None:
        tree, custom_metadata = files.metadata()
        return CheckpointMetadata(
            path=_shown(path), metadata={STATE: tree}, custom_metadata=custom_metadata
        )
    place = _located(path)
    record = place.reader.step_record(place.step)
    described = metadata_of.of_step(record, None)
    items = item_args.abstract_items(
        record, lambda name: place.reader.item_files(place.step, name), context
    )
    return CheckpointMetadata(
        path=_shown(path),
        metadata=items,
        init_timestamp_nsecs=described.init_timestamp_nsecs,
        commit_timestamp_nsecs=described.commit_timestamp_nsecs,
        custom_metadata=described.custom_metadata,
    )


def is_orbax_checkpoint(path: PathLike) -> bool:
    """Return whether there is a checkpoint at a path that `load` can read."""
    try:
        _located(path)
    except InvalidLayoutError:
        return False
    return True


def delete(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> bool:
    """Remove the checkpoint at a path, or one checkpointable of it, also if Orbax wrote it.

    Args:
        path: The checkpoint, or a step in the directory of a manager.
        checkpointable_name: What is removed; None: all. A checkpoint of Holdfast is saved again
            without it, and replaced once that is durable; a step must be the newest for that.
        missing_ok: Whether it is no error if there is nothing to remove.

    Returns:
        Whether it was there.

    Raises:
        CheckpointNotFoundError, ItemNotFoundError: A `FileNotFoundError`: it is not there.
        InvalidLayoutError: A `ValueError`: there is no checkpoint.
        InvalidArgumentError: A `ValueError`: it is the only checkpointable.
        StepOrderError: A `ValueError`: the step is not the newest one.
    """
    if not isinstance(missing_ok, bool):
        raise ArgumentTypeError(f"delete {path}: expected a bool missing_ok, found {missing_ok!r}")
    item_args.check_deleted_name(checkpointable_name)
    if current().deletion.gcs_deletion_options.todelete_full_path is not None:
        raise InvalidArgumentError(
            f"delete {path}: todelete_full_path is for buckets; leave it out"
        )
    folder = Path(os.path.abspath(os.fspath(path)))
    try:
        place = _located(path)
    except InvalidLayoutError:
        if os.path.lexists(folder):
            raise
        if missing_ok:
            return False
        raise CheckpointNotFoundError(f"delete {path}: there is no checkpoint") from None
    if place.item is not None:
        raise InvalidLayoutError(
            f"delete {path}: it is one checkpointable; give the path of the checkpoint, and "
            "checkpointable_name"
        )
    try:
        _remove(folder, place, checkpointable_name)
    except ItemNotFoundError:
        if missing_ok:
            return False
        raise
    return True


def _remove(folder: Path, place: Located, name: str | None) -> None:
    is_own = place.reader.directory == folder
    if is_own and name is not None:
        state, _ = place.reader.state_without(place.step, name)
        holdfast.save(folder, state, overwrite=True)
    elif is_checkpoint(folder) and name is not None:
        place.reader.delete_old_item(place.step, name)
    elif is_own or is_checkpoint(folder):
        if jax.process_index() == 0:
            delete_folder(folder)
    else:
        with CheckpointManager(folder.parent) as manager:
            if name is None:
                manager.delete(place.step)
            else:
                manager.delete_item(place.step, name)


def delete_async(path: PathLike, **options: Any) -> AsyncResponse:
    """Remove as `delete` does, which has ended when this returns."""
    return completed(delete(path, **options))


def _shown(path: PathLike) -> Any:
    given = current().file.path_class
    return path_of(Path(os.fspath(path))) if given is None else given(os.fspath(path))


def _located(path: PathLike) -> Located:
    try:
        return located(Path(os.path.abspath(os.fspath(path))))
    except CheckpointNotFoundError as error:
        raise InvalidLayoutError(f"load {path}: there is no checkpoint") from error


def _safetensors(path: PathLike, context: Context) -> safetensors_files.SafetensorsFiles | None:
    """Return the safetensors files at a path, if the context's layout means them.

    Raises:
        InvalidLayoutError: It does, and there are none.
    """
    layout = context.checkpoint_layout
    if layout is CheckpointLayout.ORBAX:
        return None
    if layout is CheckpointLayout.AUTO and is_orbax_checkpoint(path):
        return None
    return safetensors_files.SafetensorsFiles(Path(os.path.abspath(os.fspath(path))))
