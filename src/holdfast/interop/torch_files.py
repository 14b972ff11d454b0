"""Files of PyTorch: checkpoints written to one, and those of others made readable by Holdfast.

What has to be there as a whole is in a scratch file beside the target, so that states may be larger
than RAM.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import save as save_one
from holdfast.building import check_file_name, new_content
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    InvalidArgumentError,
    UnsupportedLeafError,
)

try:
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
except ImportError as error:
    raise InvalidArgumentError(
        f"PyTorch's files are read and written by PyTorch, which cannot be imported ({error}): "
        "pip install 'holdfast-checkpoint[torch]'"
    ) from error

from holdfast.interop.dcp import HoldfastReader, is_of_dcp
from holdfast.interop.scratch_memory import Progress, ScratchMemory, read_whole_step
from holdfast.reading import StoredArray, open_checkpoint
from holdfast.torch import tensor_over, with_tensors

_UNREADABLE: tuple[type[BaseException], ...] = (
    *(RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError),
    *(
        AssertionError,
        struct.error,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        dcp.CheckpointException,
    ),
)
_PIECE_SIZE_BYTES = 1024 * 1024


def export_torch(
    directory: str | os.PathLike[str],
    step: int,
    file: Path,
    progress: Progress = lambda size_bytes: None,
) -> None:
    """Write the state of `step` with `torch.save`, as nested dicts; it is durable when this ends.

    What `HoldfastWriter` saved is read as DCP reads it, which executes the pickles in it.

    Args:
        directory: the run's path or URL.
        step: a step of the run.
        file: must not exist; its folder has room for it twice.
        progress: see `Progress`.

    Raises:
        InvalidArgumentError: the file exists.
        UnsupportedLeafError: PyTorch cannot save an array's dtype; the message has the path.
        NotARunError, StepNotFoundError, CheckpointDamagedError: the checkpoint.
        OutOfSpaceError, StorageError: it cannot be read, or the file not written.
    """
    check_file_name(file, "export")
    if os.path.lexists(file):
        raise InvalidArgumentError(f"export to {file}: it exists; give a new path")
    if is_of_dcp(open_checkpoint(directory, step)):
        with _translated(f"export {directory}", "objects of DCP"):
            state = _read_dcp(HoldfastReader(directory), file.parent, progress)
    else:
        state = read_whole_step(directory, step, file.parent, _tensor_over, progress)
        state = with_tensors(state, "export")
    with new_content(file, "export", is_synced=True) as stream:
        torch.save(state, stream)


def _tensor_over(array: np.ndarray, stored: StoredArray) -> torch.Tensor:
    tensor = tensor_over(array, stored.dtype, stored.name)
    if not _is_saved_by_torch(tensor.dtype):
        raise UnsupportedLeafError(
            f"export {stored.name}: expected a dtype that torch.save writes, found "
            f"{stored.dtype}; convert it, and save it again"
        )
    return tensor


@functools.cache
def _is_saved_by_torch(dtype: torch.dtype) -> bool:
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except (KeyError, RuntimeError):
        return False
    return True


@contextlib.contextmanager
def _translated(call: str, expected: str) -> Iterator[None]:
    """Raise errors of PyTorch's readers as those of Holdfast.

    Raises:
        CheckpointDamagedError: PyTorch cannot read what is `expected`.
        HoldfastError: one that was raised below DCP.
    """
    try:
        yield
    except HoldfastError:
        raise
    except _UNREADABLE as error:
        cause: BaseException = error
        if isinstance(error, dcp.CheckpointException) and error.failures:
            cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, HoldfastError):
            raise cause from error
        raise CheckpointDamagedError(
            f"{call}: expected {expected}, found {_reason(cause)}"
        ) from error


def import_torch(
    source: Path,
    directory: Path,
    progress: Progress = lambda size_bytes: None,
    task: str = "import",
) -> None:
    """Save what `torch.save` or DCP has written as a checkpoint in the new directory `directory`.

    Nothing in a file of `torch.save` is executed. Tensors that share memory there are tied again.
    DCP's folders hold pickled objects besides tensors: import those of trusted programs only. Of a
    folder the tensors are read one after another into a scratch file, a file is mapped. Tuples of a
    folder become lists, and integer keys there strings, as DCP lists them.

    Args:
        source: a file of `torch.save`, or a folder of DCP, which exists.
        directory: as for `holdfast.save`. Beside it there is room for a folder's tensors twice.
        progress: see `Progress`; a folder's tensors.
        task: why it is read, for messages.

    Raises:
        InvalidArgumentError: `directory` exists.
        CheckpointDamagedError: `source` cannot be read, or a record has another CRC than its own.
        UnsupportedLeafError: something in it is neither a tensor nor a plain value.
        OutOfSpaceError, StorageError: there is no room.
    """
    if os.path.lexists(directory) or not directory.parent.is_dir():
        raise InvalidArgumentError(
            f"import to {directory}: expected a new path in a directory that exists"
        )
    expected = "a folder of DCP" if source.is_dir() else "a file of torch.save"
    with _translated(f"{task} {source}", expected):
        if source.is_dir():
            state = _read_dcp(dcp.FileSystemReader(source), directory.parent, progress)
        else:
            state = _read_file(source)
    save_one(directory, state)


def _reason(error: BaseException) -> str:
    """Return why PyTorch cannot read a file, without its advice on how to execute the file."""
    text = str(error)
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if named is not None:
        return f"an object of {named[1]}, which is not executed; save tensors and plain values"
    if "central directory" in text:
        return "no end of the zip archive; the file is cut off or damaged"
    if "TorchScript" in text:
        return "a TorchScript archive; save the state_dict of its module"
    if isinstance(error, pickle.UnpicklingError) or text.isdigit() or not text:
        return "data that it did not write"
    return text.splitlines()[0].partition(". ")[0]


def _check_records(source: Path) -> None:
    """Compare the records of a zip archive with their CRCs, which PyTorch does not check.

    With `set_crc32_options(False)` PyTorch writes none of the CRCs: then none is right.

    Raises:
        CheckpointDamagedError: Some of the records are damaged.
        OSError, zipfile.BadZipFile: The archive cannot be read.
    """
    with zipfile.ZipFile(source) as archive:
        records = [entry.filename for entry in archive.infolist() if entry.file_size]
        damaged = [name for name in records if not _is_whole(archive, name)]
    if damaged and len(damaged) < len(records):
        raise CheckpointDamagedError(
            f"import {source}: expected records with the CRCs that are stored beside them, found "
            f"{', '.join(damaged[:5])} with another one; use another copy of the file"
        )


def _is_whole(archive: zipfile.ZipFile, name: str) -> bool:
    try:
        with archive.open(name) as record:
            while record.read(_PIECE_SIZE_BYTES):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def _read_file(source: Path) -> Any:
    if zipfile.is_zipfile(source):
        _check_records(source)
    with torch.serialization.safe_globals(_numpy_names()):
        try:
            return torch.load(source, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:
            # Files of PyTorch before 1.6 cannot be mapped.
            return torch.load(source, map_location="cpu", weights_only=True)


def _numpy_names() -> list[Any]:
    """Return what pickles of NumPy's arrays and scalars name, which makes these and nothing else.

    `export_torch` writes some, as in the states of `RandomState`.
    """
    names: list[Any] = [np.ndarray, np.dtype]
    for pickled in (np.zeros(1), np.float64(1)):
        reduced: Any = pickled.__reduce__()
        names.append(reduced[0])
    return names + [type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"]


def _read_dcp(reader: Any, folder: Path, progress: Progress) -> Any:
    """Read a whole state with a reader of DCP, its tensors into a scratch file in `folder`."""
    metadata = reader.read_metadata()
    of_tensors = {
        name: of
        for name, of in metadata.state_dict_metadata.items()
        if isinstance(of, TensorStorageMetadata)
    }
    memory = ScratchMemory(folder, [_size_bytes(of) for of in of_tensors.values()])
    flat: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
    flat |= {name: _tensor_in(memory, of) for name, of in of_tensors.items()}
    planner = _CountingPlanner(progress)
    dcp.load(flat, storage_reader=reader, planner=planner, no_dist=True)
    paths = metadata.planner_data or {}
    state: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = paths.get(name, (name,))
        node = state
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return _with_lists(state)


def _with_lists(node: Any) -> Any:
    """Return nested dicts with lists in place of those whose keys are all the indices of one.

    In DCP's paths a list has indices that are ints, and a dict has strings alone.
    """
    if not isinstance(node, dict):
        return node
    entries = {key: _with_lists(value) for key, value in node.items()}
    is_list = all(type(key) is int for key in entries) and sorted(entries) == [*range(len(entries))]
    if entries and is_list:
        return [entries[index] for index in range(len(entries))]
    return entries


def _size_bytes(of: TensorStorageMetadata) -> int:
    return int(math.prod(of.size) * of.properties.dtype.itemsize)


def _tensor_in(memory: ScratchMemory, of: TensorStorageMetadata) -> torch.Tensor:
    if not math.prod(of.size):
        return torch.empty(of.size, dtype=of.properties.dtype)
    held = memory.array((_size_bytes(of),), np.dtype(np.uint8))
    return torch.from_numpy(held).view(of.properties.dtype).reshape(of.size)


class _CountingPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """Reports the bytes of each piece of a tensor that was read."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        super().commit_tensor(read_item, tensor)
        self._progress(tensor.nbytes)
