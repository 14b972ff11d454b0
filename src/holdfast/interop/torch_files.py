"""Files of PyTorch: checkpoints written to one, and those of others made readable by Holdfast."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.errors import CheckpointDamagedError, InvalidArgumentError
from holdfast.manager import Run
from holdfast.manager import save as save_one

_UNREADABLE = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError),
    *(pickle.UnpicklingError, dcp.CheckpointException),
)


def export_torch(run: Run, step: int, file: Path) -> None:
    """Write the state of `step` with `torch.save`, as nested dicts; it is durable when this ends.

    Raises:
        InvalidArgumentError: the file exists.
        StepNotFoundError, CheckpointDamagedError, StorageError: the checkpoint.
    """
    if file.exists():
        raise InvalidArgumentError(f"export to {file}: it exists; give a new path")
    state = run.restore(step, framework="torch")
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)


def import_torch(source: Path, directory: Path) -> None:
    """Save what `torch.save` or DCP has written as a checkpoint in the new directory `directory`.

    Nothing in a file of `torch.save` is executed. Tensors that share memory there are tied again.
    DCP's folders hold pickled objects besides tensors: import those of trusted programs only. The
    tensors of a folder are all in memory at a time, those of a file are mapped. Lists of a
    folder become dicts, and integer keys there strings, as DCP lists them.

    Args:
        source: a file of `torch.save`, or a folder of DCP.
        directory: as for `holdfast.save`.

    Raises:
        InvalidArgumentError: there is nothing at `source`, or `directory` exists.
        CheckpointDamagedError: `source` cannot be read.
        UnsupportedLeafError: something in it is neither a tensor nor a plain value.
    """
    if not source.exists():
        raise InvalidArgumentError(f"import {source}: expected a file or a folder, found nothing")
    try:
        state = _read_folder(source) if source.is_dir() else _read_file(source)
    except _UNREADABLE as error:
        what = "a folder of DCP" if source.is_dir() else "a file of torch.save"
        raise CheckpointDamagedError(
            f"import {source}: expected {what}, found {str(error).splitlines()[0]}"
        ) from error
    save_one(directory, state)


def _read_file(source: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError:
        # Files of PyTorch before 1.6 cannot be mapped.
        return torch.load(source, map_location="cpu", weights_only=True)


def _read_folder(source: Path) -> Any:
    metadata = dcp.FileSystemReader(source).read_metadata()
    flat: dict[str, Any] = {
        name: torch.empty(of.size, dtype=of.properties.dtype)
        if isinstance(of, TensorStorageMetadata)
        else None
        for name, of in metadata.state_dict_metadata.items()
    }
    dcp.load(flat, storage_reader=dcp.FileSystemReader(source), no_dist=True)
    paths = metadata.planner_data or {}
    state: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = paths.get(name, (name,))
        node = state
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return state
