"""Gather the functions that programs call as `ocp.utils`: of steps, of trees, and of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.run_reader import RunReader
from holdfast.interop.orbax.step import any_checkpoint_step as any_checkpoint_step
from holdfast.interop.orbax.step import checkpoint_steps as checkpoint_steps
from holdfast.interop.orbax.step import step_from_checkpoint_name as step_from_checkpoint_name
from holdfast.interop.orbax.tree import deserialize_tree as deserialize_tree
from holdfast.interop.orbax.tree import from_flat_dict as from_flat_dict
from holdfast.interop.orbax.tree import from_flattened_with_keypath as from_flattened_with_keypath
from holdfast.interop.orbax.tree import get_key_name as get_key_name
from holdfast.interop.orbax.tree import is_dict_key as is_dict_key
from holdfast.interop.orbax.tree import is_empty_node as is_empty_node
from holdfast.interop.orbax.tree import is_empty_or_leaf as is_empty_or_leaf
from holdfast.interop.orbax.tree import is_sequence_key as is_sequence_key
from holdfast.interop.orbax.tree import serialize_tree as serialize_tree
from holdfast.interop.orbax.tree import to_flat_dict as to_flat_dict
from holdfast.interop.orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct
from holdfast.interop.orbax.tree import tuple_path_from_keypath as tuple_path_from_keypath

PyTree = Any


def checkpoint_steps_paths(checkpoint_dir: str | os.PathLike[str]) -> list[Any]:
    """Return the paths of the steps that can be restored from a program's directory."""
    folder = Path(os.fspath(checkpoint_dir))
    return [path_of(folder / str(step)) for step in RunReader(folder).saved_steps()]


def is_primary_host(primary_host: int | None = 0) -> bool:
    """Return whether this process is the primary one; with None all are."""
    return primary_host is None or jax.process_index() == primary_host


def sync_global_processes(name: str, *_: Any, **__: Any) -> None:
    """Wait until all processes have called this with the same name."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


sync_global_devices = sync_global_processes


def broadcast_one_to_all(pytree: Any, is_source: bool | None = None, **_: Any) -> Any:
    """Return the tree of the primary process in all processes."""
    if jax.process_count() == 1:
        return pytree
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(pytree, is_source=is_source)


def is_checkpoint_finalized(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a whole checkpoint at a path.

    Raises:
        CheckpointNotFoundError: There is no such path.
    """
    from holdfast.interop.orbax.checkpointers import located

    located(Path(os.path.abspath(os.fspath(path))))
    return True


def is_scalar(x: Any) -> bool:
    """Return whether a value is a number."""
    import numpy as np

    return isinstance(x, int | float | np.number)


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("utils")
