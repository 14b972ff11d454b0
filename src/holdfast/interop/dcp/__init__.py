"""torch.distributed.checkpoint (DCP): a storage in Holdfast's format.

`dcp.save(state, checkpoint_id=PATH, storage_writer=HoldfastWriter(PATH))` makes the directory PATH,
which is a run with one checkpoint like one of `holdfast.save`: all that reads runs reads it.

- A tensor is an array whose path is its name in DCP (`model.layers.0.weight`), and its chunks are
  the shards of DCP's plan. Each rank writes one part: its image and its record. Shards that form no
  grid are arrays of their own, one below the other's name for each shard.
- Another object is an array of the bytes that the planner made of it (`torch.save`).
- DCP's metadata is pickled, as a value named `__dcp_metadata__`. As with DCP's own storage, reading
  it and the objects executes pickles: load what trusted programs saved.

Invariants:
- The coordinator makes a hidden directory beside PATH, all ranks write into it, and `finish`
  commits it and renames it to PATH. PATH has all of a save or what was there before. A failed save
  leaves a hidden directory at most, which the next one removes.
- All bytes are checked by their digests when they are read.

All ranks must see the same directory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.adapt.torch import tensors
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.planning.owners import shared
from holdfast.engine.saving.part import PartImages, PartPlan
from holdfast.engine.saving.part_writer import put_image, put_record
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    InvalidArgumentError,
    NotARunError,
    StructureMismatchError,
    UnsupportedLeafError,
    translated,
)
from holdfast.format.dtypes import numpy_dtype
from holdfast.format.grid import Region, chunk_count, chunk_region, chunk_shape_of, region_shape
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.records import ArraySpec, CheckpointSpec, Container, SavedValue
from holdfast.format.values import encode_value
from holdfast.manager.one_shot import (
    SAVED,
    begin_run,
    check_replaceable,
    locked_directory,
    put_in_place,
    remove_leftovers,
)
from holdfast.reading import Checkpoint, FillTarget, StoredArray, open_checkpoint
from holdfast.store.disk import DiskStore
from holdfast.store.location import RunLocation

log = logging.getLogger(__name__)

METADATA = ("__dcp_metadata__",)
CONVERTED_SIZE_BYTES = 256 * 1024 * 1024
"""Tensors that cannot be filled in place are read in groups of about this size."""


@dataclass(frozen=True, kw_only=True)
class _PartOrder:
    """What a rank needs to write its part: `arrays` are the tensors of which it writes a chunk."""

    building: str
    run_id: str
    rank: int
    part_count: int
    arrays: tuple[ArraySpec, ...]


@dataclass(frozen=True, kw_only=True)
class _WrittenItem:
    """The save that an item was written for, and the array of an object; None for a tensor."""

    building: str
    array: ArraySpec | None


@dataclass(kw_only=True)
class _OpenSave:
    """A save that the coordinator has begun. `part` is its own part, after it was written."""

    building: Path
    held: contextlib.ExitStack
    arrays: tuple[ArraySpec, ...]
    containers: tuple[Container, ...]
    part: tuple[PartPlan, Sequence[str]] | None = None


class HoldfastWriter(StorageWriter, AsyncStager):  # type: ignore[misc]
    """DCP's writer to one directory for each checkpoint; see the module.

    It stages states for `dcp.async_save` itself: when that returns, the state is copied. It writes
    one save at a time, and may be pickled. Plans that DCP caches are not supported.

    Args:
        path: The directory of the checkpoint. A `checkpoint_id` that DCP is given replaces it.
    """

    _synchronize_after_execute = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = _directory(path)
        self._saving: _OpenSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without a save that this process has begun."""
        return {**self.__dict__, "_saving": None}

    @property
    def checkpoint_id(self) -> str:
        """The directory of the current checkpoint."""
        return str(self._directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        # Its options: no pinned and no shared memory, copied before this returns. Each call has a
        # stager of its own, because one reuses the memory of the state staged before.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            return stager.stage(state_dict)
        finally:
            stager.close()

    def close(self) -> None:
        """Remove what a failed save left."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.held.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        if checkpoint_id is not None:
            self._directory = _directory(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                f"save to {self._directory}: expected use_collectives=True, found False; one "
                "commit needs all ranks"
            )

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Begin the save, and divide the arrays among the ranks. The coordinator calls it.

        Raises:
            InvalidArgumentError: something else is at the path, or a plan is a cached one.
            UnsupportedLeafError: a tensor cannot be stored.
            OutOfSpaceError, StorageError: the directory cannot be made.
        """
        if not all(plan.usable for plan in plans):
            raise InvalidArgumentError(
                f"save to {self._directory}: expected whole plans, found cached ones; use a "
                "planner with enable_plan_caching=False"
            )
        self.close()
        arrays, containers = _arrays_of(plans)
        clock, directory = SystemClock(), self._directory
        with translated("save to", directory), contextlib.ExitStack() as held:
            directory.parent.mkdir(parents=True, exist_ok=True)
            _check_replaceable(directory, directory)
            remove_leftovers(directory)
            building = held.enter_context(locked_directory(directory, clock))
            run_id = begin_run(DiskStore(building, clock), directory, clock)
            self._saving = _OpenSave(
                building=building, held=held.pop_all(), arrays=arrays, containers=containers
            )
        owned: list[list[ArraySpec]] = [[] for _ in plans]
        for array in arrays:
            for rank in {rank for rank, _ in _owners(array)}:
                owned[rank].append(array)
        return [
            replace(
                plan,
                storage_data=_PartOrder(
                    building=str(building),
                    run_id=run_id,
                    rank=rank,
                    part_count=len(plans),
                    arrays=tuple(owned[rank]),
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's part; the coordinator's has no record before `finish`.

        Raises:
            UnsupportedLeafError: the planner resolves an item to another shape or dtype.
            OutOfSpaceError, StorageError: the part is not written.
        """
        order: _PartOrder = plan.storage_data
        objects = [_Saved(item, planner) for item in plan.items if _is_object(item)]
        arrays = (*order.arrays, *(one.array(order.rank) for one in objects))
        part = PartPlan(
            run_id=order.run_id,
            id=SAVED,
            rank=order.rank,
            part_count=order.part_count,
            layout=image_layout(arrays, order.rank),
            spec=_spec(arrays, (), ()),
            process_values=(),
        )
        chunk_bytes = _ItemBytes(arrays, plan.items, objects, planner)
        store, images = DiskStore(Path(order.building), SystemClock()), PartImages(own=part.layout)
        digests = put_image(store, part, images, chunk_bytes)
        if order.rank:
            put_record(store, part, images, digests)
        else:
            self._current(order.building).part = part, digests
        made = {one.fqn: one.array(order.rank) for one in objects}
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=_size_bytes(item, made),
                storage_data=_WrittenItem(building=order.building, array=made.get(item.index.fqn)),
            )
            for item in plan.items
        ]
        done: Any = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Commit the checkpoint and put it in its place; the coordinator calls it.

        Raises:
            InvalidArgumentError: another save began with this writer meanwhile.
            ObjectNotFoundError, CheckpointDamagedError: a rank's part is not there.
            OutOfSpaceError, StorageError: the checkpoint is not at the path.
        """
        written = [result.storage_data for of_rank in results for result in of_rank]
        saving = self._current(*{one.building for one in written})
        try:
            assert saving.part is not None
            metadata.storage_meta = self.storage_meta()
            made = tuple(one.array for one in written if one.array is not None)
            value = encode_value(pickle.dumps(metadata), METADATA[0])
            values = (SavedValue(path=METADATA, value=value),)
            spec = _spec((*saving.arrays, *made), saving.containers, values)
            part, digests = saving.part
            store = DiskStore(saving.building, SystemClock())
            with translated("save to", self._directory):
                whole = replace(part, spec=spec)
                put_record(store, whole, PartImages(own=part.layout), digests)
                commit(store, SAVED, part.part_count)
                check = partial(_check_replaceable, directory=self._directory)
                put_in_place(saving.building, self._directory, check)
        finally:
            self.close()

    def _current(self, *buildings: str) -> _OpenSave:
        saving = self._saving
        if saving is None or any(building != str(saving.building) for building in buildings):
            raise InvalidArgumentError(
                f"save to {self._directory}: another save began with this HoldfastWriter before "
                "this one ended; wait for it, or use a writer for each"
            )
        return saving


class HoldfastReader(StorageReader):  # type: ignore[misc]
    """DCP's reader of what `HoldfastWriter` has written, into any shards of any number of ranks.

    Tensors in the host's memory are filled in place if they are contiguous and have the saved
    dtype, others by `copy_`. After an error their elements are undefined, as with DCP's own reader.

    Args:
        path: The directory of the checkpoint. A `checkpoint_id` that DCP is given replaces it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = _directory(path)
        self._checkpoint: Checkpoint | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open checkpoint."""
        return {**self.__dict__, "_checkpoint": None}

    @property
    def checkpoint_id(self) -> str:
        """The directory of the current checkpoint."""
        return str(self._directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint = None
        if checkpoint_id is not None:
            self._directory = _directory(checkpoint_id)

    # A parameter named `kwargs` would make DCP look for metadata of each rank.
    def read_metadata(self, *args: Any, **options: Any) -> Any:
        """Return the metadata of the checkpoint as DCP made it.

        Raises:
            NotARunError: there is no checkpoint, or another program wrote it.
            CheckpointDamagedError, NewerFormatError, StorageError: it cannot be read.
        """
        try:
            return self._metadata()
        except HoldfastError as error:
            # DCP before 2.12 reports "metadata is None", without the reason.
            log.warning("%s", error)
            raise

    def _metadata(self) -> Metadata:
        self._checkpoint = open_checkpoint(self._directory, SAVED.step)
        values = self._checkpoint.values
        if METADATA not in values:
            raise NotARunError(
                f"read {self._directory}: expected a checkpoint that HoldfastWriter wrote, found "
                "another; use holdfast.load"
            )
        found = pickle.loads(values[METADATA])  # type: ignore[arg-type]
        if not isinstance(found, Metadata):
            raise CheckpointDamagedError(
                f"read {self._directory}: expected DCP's metadata, found {type(found).__name__}"
            )
        return found

    def set_up_storage_reader(
        self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._checkpoint is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Fill all items of a plan.

        Raises:
            StructureMismatchError: an item is not in the checkpoint, or a target has another shape.
            CheckpointDamagedError, StorageError: bytes that are needed cannot be read.
        """
        checkpoint = self._checkpoint
        assert checkpoint is not None
        in_place: list[_ReadTensor] = []
        others: list[_ReadTensor | _ReadObject] = []
        for item in plan.items:
            place = _place_of(item, checkpoint)
            if item.type is LoadItemType.BYTE_IO:
                others.append(_ReadObject(item, place, planner))
                continue
            one = _ReadTensor(item, place, planner)
            if one.fills_in_place:
                in_place.append(one)
            else:
                others.append(one)
        for group in (in_place, *_groups(others)):
            checkpoint.fill([r.target for r in group if r.target.buffer.size])
            for read in group:
                read.hand_over()
        done: Any = Future()
        done.set_result(None)
        return done


def _directory(path: str | os.PathLike[str]) -> Path:
    location = RunLocation.parse(path)
    if location.is_url:
        raise InvalidArgumentError(
            f"use {location}: expected a path, found a URL; DCP's checkpoints are directories"
        )
    return location.folder


def _check_replaceable(place: Path, directory: Path) -> None:
    """Check that `place` is missing, empty, or what an earlier save to `directory` made."""
    if not os.path.lexists(place):
        return
    if place.is_symlink() or not place.is_dir() or os.listdir(place):
        check_replaceable(place, directory=directory, clock=SystemClock())


def _is_object(item: Any) -> bool:
    return item.type is WriteItemType.BYTE_IO


def _region_of(item: Any) -> Region:
    chunk = item.tensor_data.chunk
    start = tuple(chunk.offsets)
    return start, tuple(a + d for a, d in zip(start, chunk.sizes, strict=True))


def _owners(array: ArraySpec) -> tuple[tuple[int, int], ...]:
    assert not isinstance(array.owners, int)
    return array.owners


def _arrays_of(plans: Sequence[Any]) -> tuple[tuple[ArraySpec, ...], tuple[Container, ...]]:
    """Return the arrays of all tensors of the plans, and the inner nodes above them."""
    writers: dict[str, dict[Region, int]] = {}
    items: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name = item.index.fqn
            if name == METADATA[0]:
                raise UnsupportedLeafError(f"save {name}: the name is reserved; rename the key")
            if not _is_object(item):
                items[name] = item
                # A planner of the user may let several ranks write one shard: the first does.
                writers.setdefault(name, {}).setdefault(_region_of(item), rank)
    containers = [Container(path=(), kind="dict")]
    arrays: list[ArraySpec] = []
    for name, ranks in writers.items():
        made = list(_arrays_of_tensor(name, items[name].tensor_data, ranks))
        if any(len(array.path) > 1 for array in made):
            containers.append(Container(path=(name,), kind="dict"))
        arrays += made
    return tuple(arrays), tuple(containers)


def _arrays_of_tensor(name: str, data: Any, ranks: dict[Region, int]) -> Iterator[ArraySpec]:
    """Yield the array of a tensor whose shards are written by `ranks`; or one for each shard."""
    shape, dtype = tuple(data.size), tensors.dtype_name_of(data.properties.dtype)
    if numpy_dtype(dtype) is None:
        raise UnsupportedLeafError(f"save {name}: dtype {dtype} cannot be stored; convert it")
    grid = chunk_shape_of(shape, ranks)
    if grid is None:
        for region, rank in ranks.items():
            extents = region_shape(region)
            yield ArraySpec(
                path=(name, _shard_name(region[0])),
                shape=extents,
                dtype=dtype,
                chunk_shape=extents,
                owners=((rank, 1),),
            )
        return
    if math.prod(shape) == 0:
        of_chunks = [min(ranks.values())]
    else:
        regions = (chunk_region(shape, grid, i) for i in range(chunk_count(shape, grid)))
        of_chunks = [ranks[region] for region in regions]
    owners = tuple((rank, len([*run])) for rank, run in groupby(of_chunks))
    yield ArraySpec(path=(name,), shape=shape, dtype=dtype, chunk_shape=grid, owners=owners)


def _shard_name(start: tuple[int, ...]) -> str:
    """Return the name of a shard that is an array of its own."""
    return "at " + ",".join(map(str, start))


def _spec(
    arrays: Sequence[ArraySpec],
    containers: tuple[Container, ...],
    values: tuple[SavedValue, ...],
) -> CheckpointSpec:
    owners = shared([_owners(array) for array in arrays])
    return CheckpointSpec(
        time=SystemClock().now(),
        metrics=None,
        arrays=tuple(
            msgspec.structs.replace(array, owners=of_array)
            for array, of_array in zip(arrays, owners, strict=True)
        ),
        containers=containers,
        values=values,
        process_values=(),
    )


def _size_bytes(item: Any, objects: dict[str, ArraySpec]) -> int:
    if _is_object(item):
        return objects[item.index.fqn].shape[0]
    data = item.tensor_data
    return int(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize)


class _Saved:
    """An object that is no tensor: its bytes as the planner makes them."""

    def __init__(self, item: Any, planner: Any) -> None:
        self.fqn: str = item.index.fqn
        self.data = planner.resolve_data(item).getbuffer()

    def array(self, rank: int) -> ArraySpec:
        """Return the array of the bytes, which `rank` owns."""
        shape = (len(self.data),)
        return ArraySpec(
            path=(self.fqn,), shape=shape, dtype="uint8", chunk_shape=shape, owners=((rank, 1),)
        )


class _ItemBytes:
    """The bytes of the chunks of a part, each resolved when it is written."""

    def __init__(
        self, arrays: Sequence[ArraySpec], items: Sequence[Any], objects: Any, planner: Any
    ) -> None:
        self._arrays = arrays
        self._planner = planner
        self._objects = {one.fqn: one.data for one in objects}
        # Of shards without elements, several may start where another one does.
        self._items = {
            (item.index.fqn, _region_of(item)[0]): item
            for item in items
            if not _is_object(item) and math.prod(item.tensor_data.chunk.sizes)
        }

    def __call__(self, chunk: Chunk) -> memoryview:
        path = self._arrays[chunk.array_index].path
        name = str(path[0])
        if name in self._objects:
            return memoryview(self._objects[name]).cast("B")
        # A shard that is an array of its own is found by its name.
        start = chunk.start
        if len(path) > 1:
            text = str(path[1]).removeprefix("at ")
            start = tuple(int(part) for part in text.split(",") if part)
        item = self._items[name, start]
        found = self._planner.resolve_data(item).detach()
        data = item.tensor_data
        if (found.shape, found.dtype) != (data.chunk.sizes, data.properties.dtype):
            raise UnsupportedLeafError(
                f"save {name}: expected a tensor of shape {tuple(data.chunk.sizes)} and "
                f"{data.properties.dtype} as planned, found one of shape {tuple(found.shape)} and "
                f"{found.dtype}; plan what the planner's resolve_data returns"
            )
        return tensors.host_bytes(found)


def _place_of(item: Any, checkpoint: Checkpoint) -> tuple[StoredArray, Region]:
    """Return the array and the region that an item reads.

    Raises:
        StructureMismatchError: the checkpoint does not have it.
    """
    index, arrays = item.storage_index, checkpoint.arrays
    whole = arrays.get((index.fqn,))
    lengths = tuple(item.lengths)
    if item.type is LoadItemType.BYTE_IO and whole is not None:
        return whole, whole.region
    offset = tuple(index.offset) if index.offset is not None else (0,) * len(lengths)
    start = tuple(item.storage_offsets)
    if whole is not None:
        start = tuple(a + b for a, b in zip(offset, start, strict=True))
    else:
        whole = arrays.get((index.fqn, _shard_name(offset)))
    if whole is None:
        raise StructureMismatchError(
            f"load {index.fqn}: expected it in the checkpoint, found no shard at {offset}"
        )
    return whole, (start, tuple(a + d for a, d in zip(start, lengths, strict=True)))


class _ReadTensor:
    """The elements that one item reads, and the tensor that gets them."""

    def __init__(self, item: Any, place: tuple[StoredArray, Region], planner: Any) -> None:
        array, region = place
        self._item, self._planner, self._array = item, planner, array
        self._tensor = planner.resolve_tensor(item).detach()
        shape = region_shape(region)
        if tuple(self._tensor.shape) != shape:
            raise StructureMismatchError(
                f"load {array.name}: expected a tensor of shape {shape} to fill, found "
                f"{tuple(self._tensor.shape)}"
            )
        self._has_dtype = tensors.dtype_name_of(self._tensor.dtype) == array.dtype
        self.fills_in_place = self._has_dtype and _is_plain(self._tensor)
        if self.fills_in_place:
            flat = tensors.bytes_of(self._tensor).numpy()
            buffer = flat.view(array.numpy_dtype).reshape(shape)
        else:
            buffer = np.empty(shape, array.numpy_dtype)
        self.target = FillTarget(array.path, region, buffer)

    def hand_over(self) -> None:
        """Give the elements to the planner."""
        if not self.fills_in_place and self.target.buffer.size:
            if self._has_dtype:
                tensors.fill(self._tensor, {self.target.region: self.target.buffer})
            else:
                array = self._array
                self._tensor.copy_(tensors.tensor_of(self.target.buffer, array.dtype, array.name))
        self._planner.commit_tensor(self._item, self._tensor)


class _ReadObject:
    """The bytes of one object."""

    def __init__(self, item: Any, place: tuple[StoredArray, Region], planner: Any) -> None:
        array, region = place
        self._item, self._planner = item, planner
        buffer = np.empty(array.shape, np.uint8)
        self.target = FillTarget(array.path, region, buffer)

    def hand_over(self) -> None:
        """Give the bytes to the planner."""
        self._planner.load_bytes(self._item, io.BytesIO(self.target.buffer.tobytes()))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is its elements in C order, in the host's memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _groups(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield items in groups of about `CONVERTED_SIZE_BYTES`."""
    group: list[Any] = []
    size_bytes = 0
    for one in items:
        group.append(one)
        size_bytes += one.target.buffer.nbytes
        if size_bytes >= CONVERTED_SIZE_BYTES:
            yield group
            group, size_bytes = [], 0
    yield group
