"""A checkpoint whose parts are written by several processes: planned, written and committed.

One process, the coordinator, plans the checkpoint and commits it; how the processes exchange the
plan and their results is the caller's. In this order:

1. The coordinator makes a `CheckpointBuilder` of the arrays, and sends each process its task.
2. Each process calls `PartTask.write`, which returns when its part is durable. The coordinator
   writes the part of rank 0.
3. When all have returned, the coordinator calls `CheckpointBuilder.commit`.

Until `commit` returns, the directory is not there, or is as it was before. All processes must see
the directory's parent. At the URL of a bucket the same holds for what readers find there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.building.directory import (
    SAVED,
    begin_run,
    check_replaceable,
    locked_directory,
    put_in_place,
    remove_leftovers,
)
from holdfast.building.prefix import NewPrefix
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.planning.owners import shared
from holdfast.engine.saving.part import PartImages, PartPlan
from holdfast.engine.saving.part_writer import put_image, put_record
from holdfast.errors import InvalidArgumentError, UnsupportedLeafError, translated
from holdfast.format import paths
from holdfast.format.dtypes import numpy_dtype
from holdfast.format.grid import Region, chunk_count, chunk_region, chunk_shape_of
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.names import CheckpointId
from holdfast.format.records import ArraySpec, CheckpointSpec, SavedValue, dict_container
from holdfast.format.values import encode_value
from holdfast.store.disk import DiskStore
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation, open_durable

RegionBytes = Callable[[paths.Path, Region], memoryview]
"""Returns the bytes of a region of the array at a path: contiguous, in C order, little-endian."""


class _Place(Protocol):
    """Where a checkpoint is built: beside its directory, or below the prefix of a bucket."""

    store: DurableStore
    where: str
    """The path or URL by which another process opens the store."""
    run_id: str
    id: CheckpointId

    def commit(self, part_count: int) -> None:
        """Commit the checkpoint, and put it in its place."""
        ...

    def close(self) -> None:
        """Remove what was built, unless it is in its place. Idempotent."""
        ...


class _NewDirectory:
    """A hidden directory, which becomes `directory` by a rename."""

    id = SAVED

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        clock = SystemClock()
        directory.parent.mkdir(parents=True, exist_ok=True)
        _check_free(directory, directory)
        remove_leftovers(directory)
        with ExitStack() as held:
            self._building = held.enter_context(locked_directory(directory, clock))
            self.where = str(self._building)
            self.store: DurableStore = DiskStore(self._building, clock)
            self.run_id = begin_run(self.store, directory, clock)
            self._held = held.pop_all()

    def commit(self, part_count: int) -> None:
        commit(self.store, self.id, part_count)
        put_in_place(
            self._building, self._directory, partial(_check_free, directory=self._directory)
        )

    def close(self) -> None:
        self._held.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewArray:
    """One array of a new checkpoint.

    Attributes:
        path: its place in the tree; no two arrays have one path.
        shape: its extents.
        dtype: the name of its dtype, as NumPy or ml_dtypes has it (`float32`, `bfloat16`).
        writers: the regions in which it is written, and the rank whose process writes each. They
            form a grid (`forms_grid`). Of an array without elements nothing is written.
    """

    path: paths.Path
    shape: tuple[int, ...]
    dtype: str
    writers: Mapping[Region, int]


def forms_grid(shape: tuple[int, ...], regions: Iterable[Region]) -> bool:
    """Return whether the regions are all cells of a grid over an array, as `NewArray` needs."""
    return chunk_shape_of(shape, regions) is not None


class WrittenPart:
    """The part that `PartTask.write` has written. The coordinator gives that of rank 0 back."""

    def __init__(self, plan: PartPlan, digests: Sequence[str]) -> None:
        self._plan = plan
        self._digests = digests

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        return self._plan.rank


class PartTask:
    """The part of one rank: of `CheckpointBuilder.tasks`, and sent to its process by pickle."""

    def __init__(
        self, place: _Place, rank: int, part_count: int, arrays: tuple[ArraySpec, ...]
    ) -> None:
        self._where = place.where
        self._run_id = place.run_id
        self._id = place.id
        self._rank = rank
        self._part_count = part_count
        self._arrays = arrays

    @property
    def save(self) -> str:
        """The name of the save that it belongs to, which no other save has."""
        return _save_name(self._where, self._id)

    @property
    def rank(self) -> int:
        """The rank that writes it."""
        return self._rank

    def write(self, region_bytes: RegionBytes, own: Sequence[NewArray] = ()) -> WrittenPart:
        """Write the part; it is durable when this returns.

        Args:
            region_bytes: called for each region that this rank writes, in the order of the file.
                In a directory the bytes are used until the next call. For a bucket they must stay
                until `write` returns, and a region may be asked for again.
            own: arrays that only this process knew of, and writes whole. The coordinator passes
                them to `commit`, in the order of the ranks.

        Raises:
            UnsupportedLeafError: an array of `own` cannot be stored.
            OutOfSpaceError, StorageError: the part is not written.
        """
        arrays = (*self._arrays, *map(_spec_of_array, own))
        plan = PartPlan(
            run_id=self._run_id,
            id=self._id,
            rank=self._rank,
            part_count=self._part_count,
            layout=image_layout(arrays, self._rank),
            spec=_spec(arrays, {}),
            process_values=(),
        )

        def chunk_bytes(chunk: Chunk) -> memoryview:
            return region_bytes(arrays[chunk.array_index].path, (chunk.start, chunk.stop))

        store, images = open_durable(self._where, SystemClock()), PartImages(own=plan.layout)
        digests = put_image(store, plan, images, chunk_bytes)
        if self._rank:
            # The record of rank 0 has the whole checkpoint's arrays, which `commit` knows.
            put_record(store, plan, images, digests)
        return WrittenPart(plan, digests)


class CheckpointBuilder:
    """A checkpoint that is being written to a new directory, or to a URL; see the module.

    It is a run with one checkpoint like one of `holdfast.save`. What an earlier save made there is
    replaced, and so is an empty directory.

    Args:
        directory: a path, whose parent is made if it is missing; or the URL of a bucket and a
            prefix in it.
        arrays: all arrays that the coordinator knows of.
        part_count: the number of processes, whose ranks count from 0.

    Raises:
        InvalidArgumentError: something else is at the directory or the URL, or the regions of an
            array form no grid.
        UnsupportedLeafError: an array cannot be stored.
        OutOfSpaceError, StorageError: the directory cannot be made, or the bucket not be used.
    """

    def __init__(
        self, directory: str | os.PathLike[str], arrays: Sequence[NewArray], part_count: int
    ) -> None:
        location = RunLocation.parse(directory)
        self._location = location.text
        self._arrays = tuple(map(_spec_of_array, arrays))
        with translated("save to", location.text):
            self._place: _Place = (
                NewPrefix(location.text) if location.is_url else _NewDirectory(location.folder)
            )
        written: list[list[ArraySpec]] = [[] for _ in range(part_count)]
        for array in self._arrays:
            for rank in {rank for rank, _ in _owners(array)}:
                written[rank].append(array)
        self.tasks: Sequence[PartTask] = [
            PartTask(self._place, rank, part_count, tuple(of_rank))
            for rank, of_rank in enumerate(written)
        ]
        """The task of each rank."""

    @property
    def save(self) -> str:
        """The name of this save, which its tasks have too."""
        return _save_name(self._place.where, self._place.id)

    def commit(
        self,
        first: WrittenPart,
        *,
        own: Sequence[NewArray] = (),
        values: Mapping[paths.Path, object] | None = None,
    ) -> None:
        """Commit the checkpoint and put it in its place; it is durable when this returns.

        Args:
            first: the part of rank 0.
            own: the arrays that the processes passed to `write`, in the order of the ranks.
            values: plain Python values by path; each node above them and above arrays is a dict.

        Raises:
            InvalidArgumentError: `first` is another rank's, or a directory of others is at the
                place meanwhile.
            UnsupportedLeafError: a value cannot be stored.
            ObjectNotFoundError, CheckpointDamagedError: a rank's part is not there.
            FencedError: at a URL, another save began after this one.
            OutOfSpaceError, StorageError: the checkpoint is not at its place.
        """
        if first.rank != 0:
            raise InvalidArgumentError(
                f"save to {self._location}: expected the part of rank 0, found that of rank "
                f"{first.rank}; the process that commits writes rank 0's"
            )
        spec = _spec((*self._arrays, *map(_spec_of_array, own)), values or {})
        part = first._plan
        with translated("save to", self._location):
            images = PartImages(own=part.layout)
            put_record(self._place.store, replace(part, spec=spec), images, first._digests)
            self._place.commit(part.part_count)

    def close(self) -> None:
        """Remove what was built, unless it is in its place. Idempotent."""
        self._place.close()


def _save_name(where: str, checkpoint: CheckpointId) -> str:
    return f"{where} {checkpoint.attempt.name}"


def _check_free(place: Path, directory: Path) -> None:
    """Check that `place` is missing, empty, or what an earlier save to `directory` made."""
    if not os.path.lexists(place):
        return
    if place.is_symlink() or not place.is_dir() or os.listdir(place):
        check_replaceable(place, directory=directory, clock=SystemClock())


def _spec_of_array(array: NewArray) -> ArraySpec:
    name, shape = paths.path_name(array.path), array.shape
    if numpy_dtype(array.dtype) is None:
        raise UnsupportedLeafError(f"save {name}: dtype {array.dtype} cannot be stored; convert it")
    grid = chunk_shape_of(shape, array.writers)
    if grid is None:
        raise InvalidArgumentError(
            f"save {name}: expected regions that form a grid over {shape}, found others; save each "
            "as an array of its own"
        )
    if math.prod(shape) == 0:
        of_chunks = [min(array.writers.values())]
    else:
        regions = (chunk_region(shape, grid, i) for i in range(chunk_count(shape, grid)))
        of_chunks = [array.writers[region] for region in regions]
    owners = tuple((rank, len([*run])) for rank, run in groupby(of_chunks))
    return ArraySpec(
        path=array.path, shape=shape, dtype=array.dtype, chunk_shape=grid, owners=owners
    )


def _owners(array: ArraySpec) -> tuple[tuple[int, int], ...]:
    assert not isinstance(array.owners, int)
    return array.owners


def _spec(arrays: Sequence[ArraySpec], values: Mapping[paths.Path, object]) -> CheckpointSpec:
    owners = shared([_owners(array) for array in arrays])
    leaves = [*(array.path for array in arrays), *values]
    nodes: dict[paths.Path, dict[str | int, None]] = {(): {}}
    for path in leaves:
        for end, key in enumerate(path):
            nodes.setdefault(path[:end], {})[key] = None
    return CheckpointSpec(
        time=SystemClock().now(),
        metrics=None,
        arrays=tuple(
            msgspec.structs.replace(array, owners=of_array)
            for array, of_array in zip(arrays, owners, strict=True)
        ),
        containers=tuple(dict_container(path, [*keys]) for path, keys in nodes.items()),
        values=tuple(
            SavedValue(path=path, value=encode_value(value, paths.path_name(path)))
            for path, value in values.items()
        ),
        process_values=(),
    )
