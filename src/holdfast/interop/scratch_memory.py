"""Checkpoints that may be larger than RAM: the kernel writes their pages to a file where it has to.

What another program's files need as a whole is in a scratch file beside them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from holdfast.building import local_path
from holdfast.errors import translated
from holdfast.reading import FillTarget, StoredArray, open_checkpoint

ALIGNMENT_BYTES = 64
GROUP_SIZE_BYTES = 64 * 1024 * 1024
"""Arrays are read in groups of about this size."""

Progress = Callable[[int], None]
"""Called with the bytes that were read since the last call."""
Item = TypeVar("Item")


class ScratchMemory:
    """Memory for arrays, in a file in `folder` that has no name and ends with the last array.

    Args:
        folder: has room for all arrays.
        sizes_bytes: those of the arrays.

    Raises:
        OutOfSpaceError, StorageError: the folder has no room, or cannot be written.
    """

    def __init__(self, folder: Path, sizes_bytes: Iterable[int]) -> None:
        total = max(1, sum(map(_aligned, sizes_bytes)))
        with (
            translated("make a scratch file in", folder),
            tempfile.TemporaryFile(dir=folder) as file,
        ):
            # Otherwise a full disk would end the process when a page is written.
            os.posix_fallocate(file.fileno(), 0, total)
            self._pages = mmap.mmap(file.fileno(), total)
        self._used_bytes = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the next array, which is zero."""
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        flat = np.frombuffer(self._pages, dtype, count, self._used_bytes)
        self._used_bytes += _aligned(count * dtype.itemsize)
        return flat.reshape(shape)


def scratch_folder(directory: str | os.PathLike[str]) -> Path:
    """Return a folder for scratch files: beside a run's directory; for a URL, that of `TMPDIR`."""
    place = local_path(directory)
    if place is None:
        return Path(tempfile.gettempdir())
    return next(folder for folder in place.parents if folder.is_dir())


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def return_free_memory() -> None:
    """Give memory that is free back to the kernel: glibc keeps what many threads have freed."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def groups(items: Sequence[Item], size_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield the items in order, in groups of `GROUP_SIZE_BYTES` or of one larger item."""
    group: list[Item] = []
    held_bytes = 0
    for item in items:
        if group and held_bytes + size_bytes(item) > GROUP_SIZE_BYTES:
            yield group
            group, held_bytes = [], 0
        group.append(item)
        held_bytes += size_bytes(item)
    if group:
        yield group


def read_whole_step(
    directory: str | os.PathLike[str],
    step: int,
    folder: Path,
    make: Callable[[np.ndarray, StoredArray], Any],
    progress: Progress = lambda size_bytes: None,
) -> Any:
    """Read a whole state, as `Run.restore` without `like`, into a scratch file in `folder`.

    Args:
        directory: the run's path or URL.
        step: a step of the run.
        folder: has room for the state.
        make: returns the framework's array over the memory of an array as stored.
        progress: see `Progress`.

    Raises:
        NotARunError, StepNotFoundError, CheckpointDamagedError, StorageError: the checkpoint.
        OutOfSpaceError: `folder` has no room.
    """
    checkpoint = open_checkpoint(directory, step)
    stored = [array for array in checkpoint.arrays.values() if array.alias_of is None]
    memory = ScratchMemory(folder, [array.size_bytes for array in stored])
    targets = [
        FillTarget(array.path, array.region, memory.array(array.shape, array.numpy_dtype))
        for array in stored
    ]
    for group in groups(targets, _target_size_bytes):
        checkpoint.fill(group)
        progress(sum(map(_target_size_bytes, group)))
    return_free_memory()
    return checkpoint.tree(
        {target.path: make(target.buffer, checkpoint.arrays[target.path]) for target in targets}
    )


def _target_size_bytes(target: FillTarget) -> int:
    return target.buffer.nbytes
