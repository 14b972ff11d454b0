"""The contents of one checkpoint or file, as entries by name, which are compared one by one.

An entry is an array, whose elements are read when they are needed, or a Python value. A list, tuple
or dict is not an entry, its members are. So a state has the same entries in a run, where an
iterator's state is one value, and in a file, where it is a part of the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from holdfast.format.dtypes import dtype_name, numpy_dtype
from holdfast.format.grid import Region, rectangles, region_shape
from holdfast.format.paths import Path, path_name
from holdfast.reading import ChunkDigests

PIECE_SIZE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayEntry:
    """One array.

    Attributes:
        shape: its extents.
        dtype: the name of its dtype.
        read: returns the elements of a region.
        traits: what else its type says: `weak type`, `NumPy scalar`, `threefry2x32 keys`; None: not
            known, as in a file.
        digests: returns the digests of its chunks; None: it has none.
        has_ranks: whether several ranks have saved the checkpoint.
        alias_of: the name of the array whose elements these are (tied tensors); None: its own.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Region], np.ndarray]
    traits: tuple[str, ...] | None = None
    digests: Callable[[], ChunkDigests | None] = lambda: None
    has_ranks: bool = False
    alias_of: str | None = None

    @property
    def type_text(self) -> str:
        """The type in words: `float32 (4, 8), weak type`."""
        return ", ".join((f"{self.dtype} {self.shape}", *(self.traits or ())))

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        dtype = numpy_dtype(self.dtype)
        return math.prod(self.shape) * dtype.itemsize if dtype is not None else 0


Entries = Mapping[str, Any]
"""By name an `ArrayEntry` or a Python value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is compared.

    Attributes:
        label: its name in results: `runs/a@120`.
        entries: the arrays and values that all processes share.
        of_ranks: the entries of each process's own objects, in the order of the ranks.
        metrics: the metrics that were saved with it.
        is_file: whether it is a file of another program, which has no metrics, and in which the
            states of objects are among `entries`.
        has_values: whether it can have values at all; safetensors have arrays alone.
        to_name: returns the name that an entry of the other side has in this one; None: the same.
    """

    label: str
    entries: Entries
    of_ranks: tuple[Entries, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_file: bool = False
    has_values: bool = True
    to_name: Callable[[str], str] | None = None

    def has(self, name: str) -> bool:
        """Return whether it has an entry of this name, or below it."""
        sides = (self.entries, *self.of_ranks)
        return any(_is_within(entry, [name]) for side in sides for entry in side)

    def without(self, names: Sequence[str]) -> Contents:
        """Return it without the entries of these names, and without all below them."""
        kept = [
            {name: entry for name, entry in side.items() if not _is_within(name, names)}
            for side in (self.entries, *self.of_ranks)
        ]
        return replace(self, entries=kept[0], of_ranks=tuple(kept[1:]))


def _is_within(entry: str, names: Sequence[str]) -> bool:
    return f"{entry}/".startswith(tuple(f"{name}/" for name in names))


def check_bytes(contents: Contents) -> None:
    """Read the arrays that have digests: their bytes may not be those that the records describe.

    Raises:
        CheckpointDamagedError, StorageError: elements cannot be read.
    """
    for entries in (contents.entries, *contents.of_ranks):
        for entry in entries.values():
            # The elements of a second name are those of the first one.
            if isinstance(entry, ArrayEntry) and entry.alias_of not in entries:
                chunks = entry.digests()
                for region in chunks.regions if chunks is not None else ():
                    for piece in pieces(region):
                        entry.read(piece)


def pieces(region: Region) -> Iterator[Region]:
    """Yield a region in disjoint parts whose elements fit into memory."""
    shape = region_shape(region)
    size, step = math.prod(shape), PIECE_SIZE_BYTES // 16
    for start in range(0, size, step):
        for lower, upper in rectangles(shape, start, min(start + step, size)):
            first = tuple(x + y for x, y in zip(region[0], lower, strict=True))
            yield first, tuple(x + y for x, y in zip(region[0], upper, strict=True))


def array_entry(array: np.ndarray) -> ArrayEntry:
    """Return the entry of an array in memory."""
    return ArrayEntry(
        shape=array.shape,
        dtype=dtype_name(array.dtype) or str(array.dtype),
        read=lambda region: array[tuple(slice(a, b) for a, b in zip(*region, strict=True))],
    )


def value_entries(path: Path, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a value: itself, or those of its members, if it has any."""
    if isinstance(value, dict):
        for key, member in value.items():
            own = key if isinstance(key, int | str) else repr(key)
            yield from value_entries((*path, own), member)
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            yield from value_entries((*path, index), member)
    elif isinstance(value, np.ndarray):
        yield path_name(path), array_entry(np.asarray(value))
    else:
        yield path_name(path), value
