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

import io
import logging
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.adapt.torch import tensors
from holdfast.building import (
    STEP,
    CheckpointBuilder,
    NewArray,
    PartTask,
    WrittenPart,
    forms_grid,
)
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    InvalidArgumentError,
    NotARunError,
    StructureMismatchError,
    UnsupportedLeafError,
)
from holdfast.reading import Checkpoint, FillTarget, Region, StoredArray, open_checkpoint
from holdfast.store.location import RunLocation

log = logging.getLogger(__name__)

METADATA = ("__dcp_metadata__",)
CONVERTED_SIZE_BYTES = 256 * 1024 * 1024
"""Tensors that cannot be filled in place are read in groups of about this size."""


@dataclass(frozen=True, kw_only=True)
class _WrittenItem:
    """The save that an item was written for, and the array of an object; None for a tensor."""

    save: str
    array: NewArray | None


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
        self._saving: CheckpointBuilder | None = None
        self._first: WrittenPart | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without a save that this process has begun."""
        return {**self.__dict__, "_saving": None, "_first": None}

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
        saving, self._saving, self._first = self._saving, None, None
        if saving is not None:
            saving.close()

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
        self._saving = CheckpointBuilder(self._directory, _arrays_of(plans), len(plans))
        return [
            replace(plan, storage_data=task)
            for plan, task in zip(plans, self._saving.tasks, strict=True)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's part; the coordinator's has no record before `finish`.

        Raises:
            UnsupportedLeafError: the planner resolves an item to another shape or dtype.
            OutOfSpaceError, StorageError: the part is not written.
        """
        task: PartTask = plan.storage_data
        objects = [_Saved(item, planner) for item in plan.items if _is_object(item)]
        made = {one.fqn: one.array(task.rank) for one in objects}
        part = task.write(_ItemBytes(plan.items, objects, planner), [*made.values()])
        if task.rank == 0:
            self._current(task.save)
            self._first = part
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=_size_bytes(item, made),
                storage_data=_WrittenItem(save=task.save, array=made.get(item.index.fqn)),
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
        saving = self._current(*{one.save for one in written})
        try:
            assert self._first is not None
            metadata.storage_meta = self.storage_meta()
            own = [one.array for one in written if one.array is not None]
            saving.commit(self._first, own=own, values={METADATA: pickle.dumps(metadata)})
        finally:
            self.close()

    def _current(self, *saves: str) -> CheckpointBuilder:
        saving = self._saving
        if saving is None or any(save != saving.save for save in saves):
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
        self._checkpoint = open_checkpoint(self._directory, STEP)
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


def _is_object(item: Any) -> bool:
    return item.type is WriteItemType.BYTE_IO


def _region_of(item: Any) -> Region:
    chunk = item.tensor_data.chunk
    start = tuple(chunk.offsets)
    return start, tuple(a + d for a, d in zip(start, chunk.sizes, strict=True))


def _arrays_of(plans: Sequence[Any]) -> list[NewArray]:
    """Return the arrays of all tensors of the plans."""
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
    return [
        array
        for name, ranks in writers.items()
        for array in _arrays_of_tensor(name, items[name].tensor_data, ranks)
    ]


def _arrays_of_tensor(name: str, data: Any, ranks: dict[Region, int]) -> Iterator[NewArray]:
    """Yield the array of a tensor whose shards are written by `ranks`; or one for each shard."""
    shape, dtype = tuple(data.size), tensors.dtype_name_of(data.properties.dtype)
    if forms_grid(shape, ranks):
        yield NewArray(path=(name,), shape=shape, dtype=dtype, writers=ranks)
        return
    for region, rank in ranks.items():
        extents = _shape_of(region)
        whole = (0,) * len(extents), extents
        path = name, _shard_name(region[0])
        yield NewArray(path=path, shape=extents, dtype=dtype, writers={whole: rank})


def _shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in zip(*region, strict=True))


def _shard_name(start: tuple[int, ...]) -> str:
    """Return the name of a shard that is an array of its own."""
    return "at " + ",".join(map(str, start))


def _size_bytes(item: Any, objects: dict[str, NewArray]) -> int:
    if _is_object(item):
        return objects[item.index.fqn].shape[0]
    data = item.tensor_data
    return int(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize)


class _Saved:
    """An object that is no tensor: its bytes as the planner makes them."""

    def __init__(self, item: Any, planner: Any) -> None:
        self.fqn: str = item.index.fqn
        self.data = planner.resolve_data(item).getbuffer()

    def array(self, rank: int) -> NewArray:
        """Return the array of the bytes, which `rank` writes."""
        shape = (len(self.data),)
        return NewArray(path=(self.fqn,), shape=shape, dtype="uint8", writers={((0,), shape): rank})


class _ItemBytes:
    """The bytes of the chunks of a part, each resolved when it is written."""

    def __init__(self, items: Sequence[Any], objects: Any, planner: Any) -> None:
        self._planner = planner
        self._objects = {one.fqn: one.data for one in objects}
        # Of shards without elements, several may start where another one does.
        self._items = {
            (item.index.fqn, _region_of(item)[0]): item
            for item in items
            if not _is_object(item) and math.prod(item.tensor_data.chunk.sizes)
        }

    def __call__(self, path: tuple[str | int, ...], region: Region) -> memoryview:
        name = str(path[0])
        if name in self._objects:
            return memoryview(self._objects[name]).cast("B")
        # A shard that is an array of its own is found by its name.
        start = region[0]
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
        shape = _shape_of(region)
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
