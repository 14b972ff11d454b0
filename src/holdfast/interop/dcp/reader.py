"""DCP's reader: items of DCP from the regions of a checkpoint's arrays."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from holdfast.building import STEP, local_path
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    NotARunError,
    StructureMismatchError,
)
from holdfast.interop.dcp.names import METADATA, checkpoint_place, is_of_dcp, is_place, shard_name
from holdfast.reading import (
    Checkpoint,
    FillTarget,
    Region,
    StoredArray,
    open_checkpoint,
    region_shape,
)
from holdfast.torch import copy_into, dtype_name_of, host_bytes, tensor_over

log = logging.getLogger(__name__)

NATIVE_METADATA = ".metadata"
"""The file that marks a checkpoint of DCP's own storage."""
CONVERTED_SIZE_BYTES = 256 * 1024 * 1024
"""Tensors that cannot be filled in place are read in groups of about this size."""


class HoldfastReader(StorageReader):  # type: ignore[misc]
    """DCP's reader of what `HoldfastWriter` has written, into any shards of any number of ranks.

    Directories of DCP's own storage are read too, as DCP reads them: without digests. At a URL,
    torch's `FsspecReader` reads them.

    Tensors in the host's memory are filled in place if they are contiguous and have the saved
    dtype, others by `copy_`. After an error their elements are undefined, as with DCP's own reader.

    Args:
        path: The directory or URL of the checkpoint. A `checkpoint_id` that DCP is given replaces
            it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._place = checkpoint_place(path)
        self._checkpoint: Checkpoint | None = None
        self._native: FileSystemReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open checkpoint."""
        return {**self.__dict__, "_checkpoint": None, "_native": None}

    @property
    def checkpoint_id(self) -> str:
        """The directory or URL of the current checkpoint."""
        return self._place

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint = self._native = None
        if checkpoint_id is not None:
            self._place = checkpoint_place(checkpoint_id)

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
        if os.path.exists(os.path.join(self._place, NATIVE_METADATA)):
            log.info("%s is of DCP's own storage: it is read without digests", self._place)
            self._native = FileSystemReader(self._place)
            return self._native.read_metadata()
        try:
            self._checkpoint = open_checkpoint(self._place, STEP)
        except NotARunError as error:
            if local_path(self._place) is not None:
                raise
            raise NotARunError(
                f"{error}; what FsspecWriter saved at a URL is loaded by torch's FsspecReader"
            ) from error
        if not is_of_dcp(self._checkpoint):
            raise NotARunError(
                f"read {self._place}: expected a checkpoint that HoldfastWriter wrote, found "
                "another; use holdfast.load"
            )
        metadata = pickle.loads(self._checkpoint.values[METADATA])  # type: ignore[arg-type]
        if not isinstance(metadata, Metadata):
            raise CheckpointDamagedError(
                f"read {self._place}: expected DCP's metadata, found {type(metadata).__name__}"
            )
        return metadata

    def set_up_storage_reader(
        self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._checkpoint is None and self._native is None:
            self.read_metadata()
        if self._native is not None:
            self._native.set_up_storage_reader(metadata, is_coordinator)

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
        if self._native is not None:
            return self._native.read_data(plan, planner)
        checkpoint = self._checkpoint
        assert checkpoint is not None
        in_place: list[_ReadTensor] = []
        others: list[_ReadTensor | _ReadObject] = []
        for item in plan.items:
            place = _place_of(item, checkpoint)
            if item.type is LoadItemType.BYTE_IO:
                others.append(_ReadObject(item, place, planner))
                continue
            read = _ReadTensor(item, place, planner)
            if read.fills_in_place:
                in_place.append(read)
            else:
                others.append(read)
        for group in (in_place, *_groups(others)):
            checkpoint.fill([r.target for r in group if r.target.buffer.size])
            for read in group:
                read.hand_over()
        done: Any = Future()
        done.set_result(None)
        return done


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
        whole = arrays.get((index.fqn, shard_name(offset)))
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
        self._has_dtype = dtype_name_of(self._tensor.dtype) == array.dtype
        self.fills_in_place = self._has_dtype and _is_plain(self._tensor)
        if self.fills_in_place:
            buffer = np.frombuffer(host_bytes(self._tensor), array.numpy_dtype).reshape(shape)
        else:
            buffer = np.empty(shape, array.numpy_dtype)
        self.target = FillTarget(array.path, region, buffer)

    def hand_over(self) -> None:
        """Give the elements to the planner."""
        if not self.fills_in_place and self.target.buffer.size:
            if self._has_dtype:
                copy_into(self._tensor, self.target.buffer)
            else:
                array = self._array
                self._tensor.copy_(tensor_over(self.target.buffer, array.dtype, array.name))
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
    for item in items:
        group.append(item)
        size_bytes += item.target.buffer.nbytes
        if size_bytes >= CONVERTED_SIZE_BYTES:
            yield group
            group, size_bytes = [], 0
    yield group
