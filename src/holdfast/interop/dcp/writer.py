"""DCP's writer: plans and items of DCP as parts of a new checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint import SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.building import CheckpointBuilder, NewArray, PartTask, WrittenPart, forms_grid
from holdfast.errors import InvalidArgumentError, UnsupportedLeafError
from holdfast.interop.dcp.names import METADATA, checkpoint_place, is_place, shard_name
from holdfast.reading import Region, region_shape
from holdfast.torch import dtype_name_of, host_bytes


@dataclass(frozen=True, kw_only=True)
class _WrittenItem:
    """The save that an item was written for, and the array of an object; None for a tensor."""

    save: str
    array: NewArray | None


class HoldfastWriter(StorageWriter, AsyncStager):  # type: ignore[misc]
    """DCP's writer to one directory, or URL of a bucket, for each checkpoint; see the package.

    It stages states for `dcp.async_save` itself: when that returns, the state is copied. It writes
    one save at a time, and may be pickled.

    Args:
        path: The directory or URL of the checkpoint. A `checkpoint_id` that DCP is given replaces
            it.
    """

    _synchronize_after_execute = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._place = checkpoint_place(path)
        self._saving: CheckpointBuilder | None = None
        self._first: WrittenPart | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without a save that this process has begun."""
        return {**self.__dict__, "_saving": None, "_first": None}

    @property
    def checkpoint_id(self) -> str:
        """The directory or URL of the current checkpoint."""
        return self._place

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_place(checkpoint_id)

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
            self._place = checkpoint_place(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                f"save to {self._place}: expected use_collectives=True, found False; one "
                "commit needs all ranks"
            )

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Begin the save, and divide the arrays among the ranks. The coordinator calls it.

        Raises:
            InvalidArgumentError: something else is at the path, or the cached plans of several
                classes of planners may be meant.
            UnsupportedLeafError: a tensor cannot be stored.
            OutOfSpaceError, StorageError: the directory cannot be made.
        """
        with _good_caches_kept():
            plans = _whole(plans, self.checkpoint_id)
            self.close()
            self._saving = CheckpointBuilder(self._place, _arrays_of(plans), len(plans))
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
        arrays = {saved.fqn: saved.array(task.rank) for saved in objects}
        part = task.write(_ItemBytes(plan.items, objects, planner), [*arrays.values()])
        if task.rank == 0:
            self._current(task.save)
            self._first = part
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=_size_bytes(item, arrays),
                storage_data=_WrittenItem(save=task.save, array=arrays.get(item.index.fqn)),
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
            FencedError: at a URL, another save began after this one.
            ObjectNotFoundError, CheckpointDamagedError: a rank's part is not there.
            OutOfSpaceError, StorageError: the checkpoint is not at the path.
        """
        written = [result.storage_data for of_rank in results for result in of_rank]
        saving = self._current(*{item.save for item in written})
        try:
            assert self._first is not None
            metadata.storage_meta = self.storage_meta()
            own = [item.array for item in written if item.array is not None]
            saving.commit(self._first, own=own, values={METADATA: pickle.dumps(metadata)})
        finally:
            self.close()

    def _current(self, *saves: str) -> CheckpointBuilder:
        saving = self._saving
        if saving is None or any(save != saving.save for save in saves):
            raise InvalidArgumentError(
                f"save to {self._place}: another save began with this HoldfastWriter before "
                "this one ended; wait for it, or use a writer for each"
            )
        return saving


_COORDINATOR_CACHES = ("_cached_all_plans", "_cached_global_plan", "_cached_metadata")
_good_caches: dict[str, dict[str, Any]] = {}
"""DCP's caches of plans, by their names, as the last save that was begun has left them."""


@contextlib.contextmanager
def _good_caches_kept() -> Iterator[None]:
    """Put DCP's caches back if the block raises, which refuses a save.

    DCP has cached the plan of that save already. It would use it for the next state that is equal
    to the one before, on all ranks, and leave out what the refused save did not have.
    """
    is_good = False
    try:
        yield
        is_good = True
    finally:
        for name in _COORDINATOR_CACHES:
            plans = getattr(SavePlanner, name)
            if is_good:
                _good_caches[name] = dict(plans)
            else:
                plans.update(_good_caches.get(name, {}))


def _whole(plans: Sequence[Any], directory: str) -> list[Any]:
    """Return the plans, with cached ones in place of the empty ones that stand for them.

    Each rank needs a plan of its own, which has the task of this save. The caches are by the
    planner's class, and DCP does not say which planner has made the plans.
    """
    if all(plan.usable for plan in plans):
        return [*plans]
    caches = [
        cache for cache in SavePlanner._cached_global_plan.values() if len(cache) == len(plans)
    ]
    if len(caches) != 1:
        raise InvalidArgumentError(
            f"save to {directory}: expected the cached plans of one class of planners, found those "
            f"of {len(caches)}: {', '.join(SavePlanner._cached_global_plan)}; use planners with "
            "enable_plan_caching=False for all but one"
        )
    return [
        plan if plan.usable else replace(whole, usable=True)
        for plan, whole in zip(plans, caches[0], strict=True)
    ]


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
    shape, dtype = tuple(data.size), dtype_name_of(data.properties.dtype)
    if forms_grid(shape, ranks):
        yield NewArray(path=(name,), shape=shape, dtype=dtype, writers=ranks)
        return
    for region, rank in ranks.items():
        extents = region_shape(region)
        whole = (0,) * len(extents), extents
        path = name, shard_name(region[0])
        yield NewArray(path=path, shape=extents, dtype=dtype, writers={whole: rank})


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
        self._objects = {saved.fqn: saved.data for saved in objects}
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
        tensor = self._planner.resolve_data(item).detach()
        data = item.tensor_data
        if (tensor.shape, tensor.dtype) != (data.chunk.sizes, data.properties.dtype):
            advice = "plan what the planner's resolve_data returns"
            if getattr(self._planner, "_enable_plan_caching", False):
                advice = (
                    "the plan is the cached one of an earlier save, since DCP does not compare "
                    "dtypes: save with a planner with enable_plan_caching=False from now on"
                )
            raise UnsupportedLeafError(
                f"save {name}: expected a tensor of shape {tuple(data.chunk.sizes)} and "
                f"{data.properties.dtype} as planned, found one of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}; {advice}"
            )
        return host_bytes(tensor)
