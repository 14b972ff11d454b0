"""The ranks that hold an array's chunks at a save, and the buffers to fill at a restore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.format.grid import ChunkShape, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One array's chunks: for each chunk in C order, the ranks that hold a replica, ascending."""

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: ChunkShape
    holders: tuple[tuple[int, ...], ...]


class RestoreTarget(NamedTuple):
    """A buffer to fill: `buffer` has the dtype of the array as stored and the shape of `region`.

    Where `take` is set, it may be called instead of filling the buffer, with an array of the same
    dtype and shape in other memory. That array is read-only and valid as long as it is referenced.
    """

    array_index: int
    region: Region
    buffer: np.ndarray
    take: Callable[[np.ndarray], None] | None = None
