"""Fill a PyTorch state from a checkpoint: the given tensors stay the same objects."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.adapt.contract import RestoreRequest
from holdfast.adapt.like import ArrayType, FilledLeaf, LikeRestoration, LikeState
from holdfast.adapt.torch import tensors
from holdfast.adapt.torch.device_copies import DeviceCopies
from holdfast.adapt.torch.host_copies import HostCopies
from holdfast.adapt.torch.memory import differences, shared_places
from holdfast.adapt.torch.objects import NewTensor, ProcessObject
from holdfast.adapt.torch.tree import Likeness, flatten, tied
from holdfast.format.grid import Region, region_shape
from holdfast.format.paths import Path
from holdfast.format.records import ArraySpec, CheckpointSpec

SMALL_SIZE_BYTES_MAX = 64 * 1024
COMMON_SIZE_BYTES = 4 * 1024 * 1024
ALIGNMENT_BYTES = 64


def filling(
    spec: CheckpointSpec, request: RestoreRequest, count: int | None = None
) -> LikeRestoration:
    """Prepare to fill `request.like`, in a job of `count` processes if that is known.

    Raises:
        StructureMismatchError: it differs from what was saved.
        UnsupportedLeafError: it cannot be flattened, or has shards of processes of no such job.
    """
    tree = flatten(request.like, request.call, Likeness(spec=spec, request=request))
    for leaf, path in zip(tree.leaves, tree.paths, strict=True):
        if count is not None and tensors.is_tensor(leaf) and request.wants(path):
            tensors.check_ranks(leaf, path, request.call, count)
    firsts = tied(tree.leaves)
    # Of tied tensors one is looked at: the first one that is filled.
    to_fill: dict[int, tuple[Any, Path]] = {}
    for index, (leaf, path) in enumerate(zip(tree.leaves, tree.paths, strict=True)):
        if tensors.is_tensor(leaf) and request.wants(path):
            first = firsts[index]
            to_fill.setdefault(index if first is None else first, (leaf, path))
    like = LikeState(
        leaves=tree.leaves,
        paths=tree.paths,
        containers=tree.containers,
        unflatten=lambda found: tree.unflatten(list(map(_unwrapped, found))),
        ties=[
            (tree.paths[first], tree.paths[index])
            for index, first in enumerate(firsts)
            if first is not None
        ],
        differences=partial(differences, shared_places(to_fill.values())),
    )
    return LikeRestoration(spec, like, request, TorchArrayLeaves())


def _unwrapped(leaf: Any) -> Any:
    return leaf.leaf if isinstance(leaf, ProcessObject) else leaf


class TorchArrayLeaves:
    """See `holdfast.adapt.like.ArrayLeaves`."""

    takes_memory = True

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._small = _SmallBuffers()

    def type_of(self, leaf: Any) -> ArrayType | None:
        if isinstance(leaf, NewTensor):
            return ArrayType(leaf.dtype, leaf.shape)
        if isinstance(leaf, torch.Tensor):
            return ArrayType(tensors.dtype_name_of(leaf.dtype), tuple(leaf.shape))
        return None

    def has_value(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and not tensors.is_meta(leaf)

    def make_buffers(
        self, leaf: Any, array: ArraySpec, dtype: np.dtype
    ) -> dict[Region, np.ndarray]:
        held = leaf.tensor if isinstance(leaf, NewTensor) else leaf
        if tensors.is_plain(held):
            buffer = self._small.new_array(array.shape, dtype)
            return {((0,) * len(array.shape), array.shape): buffer}
        region = tensors.region_held(held)
        extents = region_shape(region)
        if not all(extents) and tensors.is_divided(held):
            return {}
        return {region: np.empty(extents, dtype)}

    def assemble_arrays(self, filled: Iterable[FilledLeaf]) -> list[Any]:
        host_copies, device_copies = HostCopies(), DeviceCopies()
        made = [
            self._assembled(leaf, buffers, (host_copies, device_copies))
            for leaf, _, buffers in filled
        ]
        host_copies.run()
        device_copies.run()
        return made

    def _assembled(
        self,
        leaf: Any,
        buffers: dict[Region, np.ndarray],
        copies: tuple[HostCopies, DeviceCopies],
    ) -> Any:
        into = leaf.tensor if isinstance(leaf, NewTensor) else leaf
        is_meta = tensors.is_meta(into)
        if is_meta:
            into = self._materialised(into)
        # Memory for a tensor that is made only now is to take the place of its buffers.
        is_queued = not is_meta and any(queued.queue(into, buffers) for queued in copies)
        if not is_queued:
            with torch.no_grad():
                tensors.fill(into, buffers)
        return into

    def _materialised(self, leaf: Any) -> Any:
        """Return a tensor with elements for one on the meta device; tied ones give the same."""
        tensor = self._made.get(id(leaf))
        if tensor is None:
            device = torch.get_default_device()
            if device.type == "meta":
                device = torch.device("cpu")
            tensor = torch.empty_like(leaf, device=device)
            if isinstance(leaf, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, requires_grad=leaf.requires_grad)
            self._made[id(leaf)] = tensor
        return tensor


class _SmallBuffers:
    """Makes the buffers of a state's small tensors in common memory.

    Most of them are never used, because the tensors are filled from the agent's memory. The page
    of an allocation of its own is touched by the allocator; that of a part of a large one is not.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used_bytes = 0

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array whose elements are undefined."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if not 0 < size_bytes <= SMALL_SIZE_BYTES_MAX:
            return np.empty(shape, dtype)
        if self._used_bytes + size_bytes > self._memory.nbytes:
            self._memory = np.empty(COMMON_SIZE_BYTES, np.uint8)
            self._used_bytes = 0
        array: np.ndarray = np.ndarray(shape, dtype, self._memory.data, self._used_bytes)
        self._used_bytes += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return array
