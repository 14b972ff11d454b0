"""Arrays that may be larger than RAM: the kernel writes their pages to a file where it has to."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from holdfast.store.object_folder import translated

ALIGNMENT_BYTES = 64


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


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
