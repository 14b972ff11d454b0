"""Find, read and write the checkpoints of AXLearn's own checkpointer, by AXLearn's own code.

A checkpoint is a folder `step_00000010` with a file `index`, which commits it. The folder without
one is what an unfinished save left, and no checkpoint.

Invariant: nothing that AXLearn wrote is changed or removed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
from axlearn.common.checkpointer import Checkpointer as AXLearnCheckpointer
from axlearn.common.checkpointer import TensorStoreStateStorage, build_step_dir
from jax.experimental import multihost_utils

from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    StorageError,
    StructureMismatchError,
)

INDEX = "index"
_STEP = re.compile(r"step_(\d{8})")
LINES_SHOWN_MAX = 12


def step_folders(directory: str) -> dict[int, str]:
    """Return the folders of steps in a directory by step, also unfinished ones; none of a URL."""
    if "://" in directory or not os.path.isdir(directory):
        return {}
    matches = ((_STEP.fullmatch(name), name) for name in sorted(os.listdir(directory)))
    return {int(match[1]): os.path.join(directory, name) for match, name in matches if match}


def committed(directory: str) -> dict[int, str]:
    """Return the folders of checkpoints in a directory by step, ascending; none of a URL."""
    return {
        step: folder
        for step, folder in step_folders(directory).items()
        if os.path.exists(os.path.join(folder, INDEX))
    }


def read(step: int, folder: str, state: Any) -> Any:
    """Return the state of a checkpoint, and set its iterators.

    Args:
        step: Its step.
        folder: Its folder.
        state: `TensorSpec`s and iterators, as for `BaseCheckpointer.restore`.

    Raises:
        StructureMismatchError: A `ValueError`: the structure, a shape or a dtype differs.
        CheckpointDamagedError: A file is missing or cannot be read.
    """
    storage = TensorStoreStateStorage.default_config().instantiate()
    try:
        return storage.restore_from_dir(step, state, ckpt_dir=folder)
    except ValueError as error:
        if _is_of_files(error):
            raise _damaged(step, folder, error) from error
        raise StructureMismatchError(f"restore step {step} of {folder}: {_first(error)}") from error
    except Exception as error:  # TensorFlow's and TensorStore's errors have many classes.
        raise _damaged(step, folder, error) from error
    finally:
        storage.stop()


def _is_of_files(error: ValueError) -> bool:
    """Return whether TensorStore, or the file `index`, could not be read."""
    return any(mark in str(error) for mark in ("NOT_FOUND", "DATA_LOSS", "tensorstore")) or (
        type(error).__name__ == "JSONDecodeError"
    )


def _damaged(step: int, folder: str, error: Exception) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"restore step {step}: the checkpoint of AXLearn in {folder} cannot be read: "
        f"{type(error).__name__}: {_first(error)}"
    )


def _first(error: Exception) -> str:
    return "\n".join(str(error).splitlines()[:LINES_SHOWN_MAX])


def write(step: int, target: str | os.PathLike[str], state: Any) -> Path:
    """Write a checkpoint as AXLearn's own checkpointer does; return its folder.

    All processes of a job call this, in the context of their mesh.

    Args:
        step: From 0, below 10^8.
        target: The directory of checkpoints, which is made if it is missing. The folder of the
            step is committed last; what an unfinished save left there is removed before.
        state: Arrays and iterators.

    Raises:
        InvalidArgumentError: The checkpoint exists, or AXLearn cannot write the state.
        StorageError: It could not be written.
    """
    folder = Path(build_step_dir(os.path.abspath(target), step=step))
    if (folder / INDEX).exists():
        raise InvalidArgumentError(f"export to {folder}: it exists; give a new path")
    if jax.process_count() > 1:
        # Each process has looked before the first one removes or writes anything.
        multihost_utils.sync_global_devices(f"holdfast export {folder}")
    storage = TensorStoreStateStorage.default_config().instantiate()
    try:
        AXLearnCheckpointer.cleanup_checkpoint(str(folder))
        storage.save_to_dir(step=step, state=state, ckpt_dir=str(folder))
        storage.wait_until_finished()
    except OSError as error:
        raise StorageError(f"export to {folder}: {error}") from error
    except (NotImplementedError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"export to {folder}: {_first(error)}") from error
    finally:
        storage.stop()
    return folder
