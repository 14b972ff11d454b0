"""Checkpoints to test with: arrays of every dtype, cut into random grids and given to random ranks.

The oracle is NumPy: the expected content is a slice of the saved array.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from hypothesis import strategies as st

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt, newest_number
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.reading.sources import CheckpointSources, find_sources
from holdfast.engine.saving.part import PartPlan
from holdfast.engine.saving.part_writer import write_part
from holdfast.format.grid import Placement
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.names import CheckpointId
from holdfast.format.records import (
    Alias,
    ArraySpec,
    CheckpointSpec,
    Owners,
    PartRecord,
    SavedValue,
)
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from tests.attempts import attempt_id, checkpoint_id

RUN_ID = "0123456789abcdef0123456789abcdef"
TIME = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)

NUMPY_DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
ML_DTYPES = [
    *("bfloat16", "int2", "uint2", "int4", "uint4"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
RECORD_DTYPES = {
    "complex32": np.dtype([("real", "<f2"), ("imag", "<f2")]),
    "float4_e2m1fn_x2": np.dtype([("two", "u1")]),
}
DTYPES = [*NUMPY_DTYPES, *ML_DTYPES, *RECORD_DTYPES]


def numpy_type(name: str) -> np.dtype:
    """Return the NumPy dtype of that name, without using Holdfast."""
    if name in RECORD_DTYPES:
        return RECORD_DTYPES[name]
    return np.dtype(getattr(ml_dtypes, name) if name in ML_DTYPES else name)


def random_array(shape: Sequence[int], dtype: str | np.dtype, seed: int) -> np.ndarray:
    """An array of random bits."""
    kind = numpy_type(dtype) if isinstance(dtype, str) else dtype
    bits = np.random.default_rng(seed).bytes(math.prod(shape) * kind.itemsize)
    if dtype == "bool":
        bits = bytes(b & 1 for b in bits)
    return np.frombuffer(bits, kind).reshape(shape)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are the same, bit for bit: NaNs and zeros by their bits too."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


@dataclass(kw_only=True)
class Made:
    """A checkpoint that was or will be saved: its arrays and their specs."""

    id: CheckpointId = field(default_factory=lambda: checkpoint_id(10))
    part_count: int = 1
    arrays: dict[tuple, np.ndarray] = field(default_factory=dict)
    specs: list[ArraySpec] = field(default_factory=list)
    values: dict[tuple, Any] = field(default_factory=dict)
    aliases: tuple[Alias, ...] = ()

    def add(
        self,
        path: tuple,
        array: np.ndarray,
        chunk_shape: Sequence[int | tuple[int, ...]] | None = None,
        owners: Sequence[tuple[int, int]] = ((0, 1),),
    ) -> None:
        """Adds an array; without more it is one chunk of rank 0."""
        self.arrays[path] = array
        self.specs.append(
            ArraySpec(
                path=path,
                shape=array.shape,
                dtype=next(
                    (n for n, of_name in RECORD_DTYPES.items() if of_name == array.dtype),
                    array.dtype.name,
                ),
                chunk_shape=tuple(array.shape if chunk_shape is None else chunk_shape),
                owners=tuple(owners),
            )
        )

    @property
    def spec(self) -> CheckpointSpec:
        """Return the spec as written: of arrays with equal owners, the first one has the list."""
        first: dict[tuple, int] = {}
        at = [first.setdefault(spec.owners, i) for i, spec in enumerate(self.specs)]
        arrays = tuple(
            spec if at[i] == i else msgspec.structs.replace(spec, owners=at[i])
            for i, spec in enumerate(self.specs)
        )
        return CheckpointSpec(
            time=TIME,
            metrics=None,
            arrays=arrays,
            aliases=self.aliases,
            containers=(),
            values=tuple(SavedValue(path=p, value=v) for p, v in self.values.items()),
            process_values=(),
        )

    def plan(self, rank: int) -> PartPlan:
        return PartPlan(
            run_id=RUN_ID,
            id=self.id,
            rank=rank,
            part_count=self.part_count,
            layout=image_layout(tuple(self.specs), rank),
            spec=self.spec,
            process_values=(),
        )

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        array = self.arrays[self.specs[chunk.array_index].path]
        cut = tuple(slice(a, b) for a, b in zip(chunk.start, chunk.stop, strict=True))
        return np.ascontiguousarray(array[cut]).reshape(-1).view(np.uint8).data

    def write(self, store: Store, ranks: Sequence[int] | None = None) -> list[PartRecord]:
        """Write the parts of `ranks`, by default of all."""
        ranks = range(self.part_count) if ranks is None else ranks
        return [write_part(store, self.plan(rank), self.chunk_bytes) for rank in ranks]

    def save(self, store: Store) -> None:
        """Writes all parts and commits."""
        self.write(store)
        commit(store, self.id, self.part_count)


def sources_of(checkpoint: CheckpointId, *stores: Store) -> CheckpointSources:
    """Return the sources of `checkpoint`; `stores` in order of distance."""
    return find_sources(checkpoint, stores, {s.name: list_checkpoints(s) for s in stores})


def begin(store: Store, *origins: tuple[int, int] | None) -> None:
    """Begins attempts 1, 2, …, each from its origin: a step and the number of its attempt."""
    for origin in origins:
        came_from = None if origin is None else checkpoint_id(*origin)
        start = AttemptStart(run_id=RUN_ID, origin=came_from, host="h", pid=1, time=TIME)
        assert begin_attempt(store, attempt_id(newest_number(store) + 1), start)


def planned_spec(placements: Sequence[Placement], owners: Sequence[Owners]) -> CheckpointSpec:
    """Return the spec of a checkpoint of arrays with these placements and owners."""
    arrays = tuple(
        ArraySpec(
            path=("params", f"layer_{i:04d}", "kernel"),
            shape=placed.shape,
            dtype=placed.dtype,
            chunk_shape=placed.chunk_shape,
            owners=of_array,
        )
        for i, (placed, of_array) in enumerate(zip(placements, owners, strict=True))
    )
    return CheckpointSpec(
        time=TIME, metrics=None, arrays=arrays, containers=(), values=(), process_values=()
    )


def disk(root: Path) -> DiskStore:
    """A durable store in `root`."""
    root.mkdir(parents=True, exist_ok=True)
    return DiskStore(root, SystemClock())


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Yield a temporary folder, in memory where possible."""
    shared = "/dev/shm"
    return tempfile.TemporaryDirectory(
        prefix="holdfast-test-", dir=shared if os.path.isdir(shared) else None
    )


def flip_bit(path: Path, bit: int) -> None:
    """Flips one bit of a file in place, so that its hard links see it too."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


# Strategies.

SEEDS = st.integers(0, 2**32)


def shapes(axes_max: int = 4, extent_max: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, extent_max), max_size=axes_max).map(tuple)


@st.composite
def grids(
    draw: Callable, axes_max: int = 4, extent_max: int = 7
) -> tuple[tuple[int, ...], tuple[int | tuple[int, ...], ...]]:
    """(shape, chunk shape), with cells of one extent or of listed ones."""
    shape = draw(shapes(axes_max, extent_max))
    return shape, tuple(draw(st.integers(min(d, 1), d) | listed_extents(d)) for d in shape)


def listed_extents(extent: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Return extents of one or more cells that add up to `extent`; none for an axis of 0."""
    if extent == 0:
        return st.nothing()
    cuts = st.sets(st.integers(1, extent - 1)) if extent > 1 else st.just(set())
    return cuts.map(lambda found: tuple(np.diff([0, *sorted(found), extent]).tolist()))


@st.composite
def regions(draw: Callable, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, stop) within `shape`; may be empty."""
    bounds = [sorted(draw(st.tuples(*[st.integers(0, d)] * 2))) for d in shape]
    return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


@st.composite
def owner_runs(draw: Callable, chunk_count: int, part_count: int) -> tuple[tuple[int, int], ...]:
    """The owners of that many chunks, run-length encoded; adjacent runs may have the same owner."""
    owners = draw(
        st.lists(st.integers(0, part_count - 1), min_size=chunk_count, max_size=chunk_count)
    )
    runs: list[tuple[int, int]] = []
    for owner in owners:
        if runs and runs[-1][0] == owner and draw(st.booleans()):
            runs[-1] = (owner, runs[-1][1] + 1)
        else:
            runs.append((owner, 1))
    return tuple(runs)


def cells(
    shape: Sequence[int], chunk_shape: Sequence[int | tuple[int, ...]]
) -> Iterator[tuple[slice, ...]]:
    """Return the chunks in C order as slices, by plain loops, without Holdfast's grid."""
    if math.prod(shape) == 0:
        yield tuple(slice(0, d) for d in shape)
        return
    cuts = [
        [*np.cumsum([0, *c]).tolist()] if isinstance(c, tuple) else [*range(0, d, c), d]
        for d, c in zip(shape, chunk_shape, strict=True)
    ]
    for cell in np.ndindex(*(len(of_axis) - 1 for of_axis in cuts)):
        yield tuple(slice(*of_axis[i : i + 2]) for i, of_axis in zip(cell, cuts, strict=True))


@st.composite
def checkpoints(draw: Callable, arrays_max: int = 4, extent_max: int = 7) -> Made:
    """A checkpoint of random arrays, grids and owners."""
    made = Made(part_count=draw(st.integers(1, 3)))
    names = draw(st.lists(st.text(max_size=4), max_size=arrays_max, unique=True))
    for name in names:
        shape, chunk_shape = draw(grids(3, extent_max))
        array = random_array(shape, draw(st.sampled_from(DTYPES)), draw(SEEDS))
        count = len(list(cells(shape, chunk_shape)))
        made.add(("s", name), array, chunk_shape, draw(owner_runs(count, made.part_count)))
    return made


def flat_names(arrays: Mapping[tuple, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by '/'-joined path, for paths that need no escaping."""
    return {"/".join(map(str, path)): array for path, array in arrays.items()}
