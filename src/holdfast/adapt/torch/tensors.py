"""PyTorch tensors: where their pieces are, their bytes, and tensors filled from host buffers.

NumPy has no dtype for many of PyTorch's, so bytes are read and written through views as uint8.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.adapt.contract import ArrayOutline
from holdfast.errors import UnsupportedLeafError
from holdfast.format.dtypes import numpy_dtype
from holdfast.format.grid import (
    ChunkShape,
    Placement,
    Region,
    chunk_count,
    chunk_region,
    chunk_shape_of,
    region_shape,
)
from holdfast.format.paths import Path, path_name

Holders = tuple[tuple[int, ...], ...]
_COMMON = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8}
"""Dtypes that can be stored, and whose elements have no conjugate."""
_WITHOUT_KERNELS = {
    getattr(torch, name, None) for name in ("uint1", "uint2", "uint4", "int1", "int2", "int4")
}
_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__


def is_tensor(leaf: object) -> bool:
    """Return whether `leaf` is a PyTorch tensor of any kind."""
    return isinstance(leaf, torch.Tensor)


def is_plain(leaf: object) -> bool:
    """Return whether `leaf` is an ordinary tensor: what other kinds have need not be looked for."""
    return type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter


@lru_cache(maxsize=256)
def dtype_name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in checkpoints, as PyTorch prints it: `float32`, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing what the program did not import."""
    if is_plain(tensor):
        return False
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a ShardedTensor, which FSDP1 has in its sharded state dicts."""
    if is_plain(tensor):
        return False
    return hasattr(tensor, "local_shards") and hasattr(tensor, "sharding_spec")


def is_divided(tensor: torch.Tensor) -> bool:
    """Return whether this process holds its own part of a tensor of several processes."""
    return is_distributed(tensor) or is_sharded(tensor)


def local(tensor: Any) -> torch.Tensor:
    """Return the elements that this process holds, outside of autograd."""
    held: torch.Tensor = tensor
    if is_distributed(tensor):
        held = tensor._local_tensor
    elif is_sharded(tensor):
        shards = tensor.local_shards()
        held = shards[0].tensor if shards else torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)
    return held.detach()


def is_meta(tensor: Any) -> bool:
    """Return whether `tensor` has no elements because it is on the meta device."""
    # A ShardedTensor without a shard on this rank does not answer `is_meta`.
    return bool(local(tensor).is_meta if is_sharded(tensor) else tensor.is_meta)


def check_storable(tensor: Any, path: Path) -> None:
    """Check that the bytes of a tensor can be stored.

    Raises:
        UnsupportedLeafError: they cannot; the message has the path and what to do.
    """
    name = path_name(path)
    problem = _problem(tensor)
    if problem is not None:
        raise UnsupportedLeafError(f"save {name}: {problem}")


def _problem(tensor: Any) -> str | None:
    if is_sharded(tensor):
        shards = tensor.local_shards()
        if len(shards) > 1:
            return f"expected a ShardedTensor of one shard on each rank, found {len(shards)}"
        return _problem(local(tensor))
    if is_lazy(tensor):
        return "the tensor has no shape yet; call its lazy module once before"
    if tensor.is_quantized:
        return (
            f"quantized tensors ({tensor.dtype}) cannot be stored; save its int_repr(), q_scale() "
            "and q_zero_point(), or dequantize() it"
        )
    if tensor.is_meta:
        return "the tensor is on the meta device and has no elements; materialise it first"
    if tensor.is_nested:
        return "nested tensors cannot be stored; save its values() and offsets()"
    if is_distributed(tensor):
        if any(placed.is_partial() for placed in tensor.placements):
            return (
                f"expected elements, found pending sums ({tensor.placements}); redistribute it to "
                "Shard or Replicate"
            )
    elif not is_plain(tensor) and is_traceable_wrapper_subclass(tensor):
        return (
            f"{type(tensor).__qualname__} wraps other tensors and cannot be stored; save the "
            "tensors in it"
        )
    elif not is_plain(tensor) and type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        return (
            f"{type(tensor).__qualname__} computes its elements (__torch_dispatch__) and cannot be "
            "stored; save an ordinary tensor"
        )
    if numpy_dtype(dtype_name_of(tensor.dtype)) is None:
        return f"dtype {tensor.dtype} cannot be stored; convert it"
    return None


def outline_of(tensor: Any, path: Path) -> ArrayOutline:
    """Return the outline of a dense tensor.

    Raises:
        UnsupportedLeafError: it cannot be stored.
    """
    check_storable(tensor, path)
    shape = tuple(tensor.shape)
    # Every process has its own ordinary tensor here; they are assumed to be equal, as with JAX.
    chunk_shape, holders = shape, ((0,),)
    if is_divided(tensor):
        if is_distributed(tensor):
            grid = _placed(shape, tensor.device_mesh, tuple(tensor.placements))
        else:
            grid = _grid(shape, {_shard_region(s): {s.placement.rank()} for s in _shards(tensor)})
        if grid is None:
            raise UnsupportedLeafError(
                f"save {path_name(path)}: expected shards that form a grid, found "
                f"{getattr(tensor, 'placements', tensor)} of shape {shape}; redistribute it"
            )
        chunk_shape, holders = grid  # type: ignore[assignment]
    placed = Placement(
        shape=shape,
        dtype=dtype_name_of(tensor.dtype),
        chunk_shape=chunk_shape,
        holders=holders,
    )
    return ArrayOutline(
        path=path,
        placement=placed,
        prng_impl=None,
        scalar=False,
        is_everywhere=not is_divided(tensor),
    )


def check_ranks(tensor: Any, path: Path, call: str, count: int) -> None:
    """Check that a tensor is divided over the processes of a job of `count`, and over no others.

    Raises:
        UnsupportedLeafError: it has shards of other processes; the message has the path.
    """
    if is_distributed(tensor):
        last = int(tensor.device_mesh._rank_map.max())
    elif is_sharded(tensor):
        last = max((shard.placement.rank() for shard in _shards(tensor)), default=0)
    else:
        return
    if last >= count:
        raise UnsupportedLeafError(
            f"{call} {path_name(path)}: expected a tensor over the ranks of this job, which has "
            f"{count}, found one with a shard of rank {last}; call "
            "torch.distributed.init_process_group() before the manager is made, and keep the group "
            "until it is closed, or use full_tensor()"
        )


def signature(leaf: Any) -> tuple[Any, ...] | None:
    """Return what the outline of a tensor depends on; None for another leaf."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if is_plain(leaf) and not leaf.is_nested:
        return leaf.shape, leaf.dtype, leaf.is_meta, type(leaf)
    if is_distributed(leaf):
        tensor: Any = leaf
        return leaf.shape, leaf.dtype, tensor.device_mesh, tuple(tensor.placements)
    if is_sharded(leaf):
        regions = [(_shard_region(s), s.placement.rank()) for s in _shards(leaf)]
        return leaf.shape, leaf.dtype, tuple(regions)
    if is_lazy(leaf):
        return id(leaf), "uninitialized"
    if leaf.is_nested:
        return id(leaf), "nested"
    return leaf.shape, leaf.dtype, leaf.is_meta, type(leaf)


@lru_cache(maxsize=4096)
def _placed(
    shape: tuple[int, ...], mesh: Any, placements: Any
) -> tuple[ChunkShape, Holders] | None:
    """Return the grid of a DTensor's shards and the ranks of each, or None if it has none.

    A mesh that is a slice of a larger one has siblings: the slices of the other ranks. Their
    tensors of that name are copies, as those of ordinary tensors are.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    ranks: dict[Region, set[int]] = {}
    of_siblings = mesh._layout.remap_to_tensor(mesh._rank_map).numpy()
    extents_of_mesh = tuple(mesh.shape)
    for coordinate in np.ndindex(*extents_of_mesh):
        extents, start = _compute_local_shape_and_global_offset(
            shape, extents_of_mesh, list(coordinate), placements
        )
        region = tuple(start), tuple(a + d for a, d in zip(start, extents, strict=True))
        if math.prod(shape) == 0:
            region = (0,) * len(shape), shape
        ranks.setdefault(region, set()).update(of_siblings[(slice(None), *coordinate)].tolist())
    return _grid(shape, ranks)


def _grid(
    shape: tuple[int, ...], ranks: dict[Region, set[int]]
) -> tuple[ChunkShape, Holders] | None:
    chunk_shape = chunk_shape_of(shape, ranks)
    if chunk_shape is None:
        return None
    regions = [chunk_region(shape, chunk_shape, i) for i in range(chunk_count(shape, chunk_shape))]
    return chunk_shape, tuple(tuple(sorted(ranks[region])) for region in regions)


def _shards(tensor: Any) -> list[Any]:
    """Return the places of the shards of a ShardedTensor, on all ranks."""
    return list(tensor.metadata().shards_metadata)


def _shard_region(shard: Any) -> Region:
    start = tuple(shard.shard_offsets)
    return start, tuple(a + d for a, d in zip(start, shard.shard_sizes, strict=True))


def piece_held(tensor: Any) -> tuple[torch.Tensor, Region]:
    """Return the elements that this process holds, and their region of the whole tensor."""
    if is_plain(tensor):
        shape = tuple(tensor.shape)
        return tensor.detach(), ((0,) * len(shape), shape)
    return local(tensor), region_held(tensor)


def region_held(tensor: Any) -> Region:
    """Return the region of the whole tensor that this process holds; it may have no elements."""
    shape = tuple(tensor.shape)
    if is_sharded(tensor):
        shards = tensor.local_shards()
        return _shard_region(shards[0].metadata) if shards else ((0,) * len(shape),) * 2
    if not is_distributed(tensor):
        return (0,) * len(shape), shape
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extents, start = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(a + d for a, d in zip(start, extents, strict=True))


def identity(tensor: Any) -> tuple[Any, ...] | None:
    """Return a key that tied tensors share: the same elements of the same memory.

    Returns:
        None for a tensor without elements of its own.
    """
    is_common = is_plain(tensor) and tensor.dtype in _COMMON and tensor.layout is torch.strided
    # A tensor on the meta device has no address.
    if is_common and not tensor.is_nested and tensor.numel() and (address := tensor.data_ptr()):
        # Nearly all tensors of a large state.
        shape = tensor.shape
        return address, shape, tensor.stride(), tensor.dtype, shape, (False, tensor.is_neg())
    if is_meta(tensor):
        return ("meta", id(tensor))
    if _problem(tensor) is not None:
        return None
    held = tensor if is_plain(tensor) else local(tensor)
    if held.layout is not torch.strided:
        return None
    if not held.numel():
        # All ranks have to find the same ties, also those whose shards have no elements.
        storage = held.untyped_storage()
        return (storage._cdata, tuple(tensor.shape)) if is_distributed(tensor) else None
    signs = held.is_conj(), held.is_neg()
    return held.data_ptr(), held.shape, held.stride(), held.dtype, tuple(tensor.shape), signs


def copyable(held: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one that PyTorch can copy: integers below a byte as the bytes they are.

    PyTorch has no copy kernel for their dtypes.
    """
    return held.view(torch.uint8) if held.dtype in _WITHOUT_KERNELS else held


def host_bytes(held: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, as `holdfast.building.RegionBytes` returns those of a region.

    Args:
        held: of any shape, dtype and device; its strides may be any.

    Returns:
        The bytes of its elements in C order: a writable view of a contiguous tensor in the host's
        memory, whose conjugate and negative bits are not set; else a copy.
    """
    dense = held
    if not held.is_cpu or not held.is_contiguous() or held.is_conj() or held.is_neg():
        dense = copyable(held).resolve_conj().resolve_neg().cpu().contiguous()
    if not dense.numel():
        return memoryview(b"")
    return memoryview(bytes_of(dense).numpy())


def bytes_of(held: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes; one with one element has any stride."""
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


def fill(into: Any, buffers: dict[Region, np.ndarray]) -> None:
    """Copy what was restored into the elements that this process holds of a tensor."""
    held = local(into)
    for buffer in buffers.values():
        copy_into(held, buffer)


def copy_into(held: torch.Tensor, array: np.ndarray) -> None:
    """Copy the elements of an array into a tensor of its shape and dtype.

    Args:
        held: on any device, with any strides; an axis may be expanded. Autograd has no part in it.
        array: its dtype has the tensor's name (`dtype_name_of`).
    """
    if not array.nbytes:
        return
    source = _as_bytes(array)
    held = copyable(held)
    if held.is_contiguous() and not held.is_conj() and not held.is_neg():
        bytes_of(held).copy_(source)
        return
    elements = source.view(held.dtype).reshape(held.shape)
    axes = expanded_axes(held)
    first_of(held, axes).copy_(first_of(elements, axes))


def expanded_axes(held: torch.Tensor) -> tuple[int, ...]:
    """Return the axes along which all elements of a tensor are one in memory."""
    sizes = zip(held.shape, held.stride(), strict=True)
    return tuple(axis for axis, (count, stride) in enumerate(sizes) if stride == 0 and count > 1)


def first_of(held: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return the first elements of a tensor along some axes, which stay."""
    for axis in axes:
        held = held.narrow(axis, 0, 1)
    return held


def _as_bytes(buffer: np.ndarray) -> torch.Tensor:
    """Return the memory of an array as bytes, without PyTorch's warning for read-only memory."""
    dense = np.ascontiguousarray(buffer)
    memory = (ctypes.c_char * dense.nbytes).from_address(dense.ctypes.data)
    content = torch.frombuffer(memory, dtype=torch.uint8)
    content._holdfast_memory = dense  # keeps it alive
    return content


def tensor_of(array: np.ndarray, name: str, where: str) -> torch.Tensor:
    """Return a new tensor with the elements of an array whose dtype has that name.

    Raises:
        UnsupportedLeafError: PyTorch has no such dtype; the message has `where`.
    """
    tensor = torch.empty(array.shape, dtype=_dtype_named(name, where))
    copy_into(tensor, array)
    return tensor


def tensor_over(array: np.ndarray, name: str, where: str) -> torch.Tensor:
    """Return a tensor of the array's shape in its memory.

    Args:
        array: in C order and writable; its dtype is `StoredArray.numpy_dtype`.
        name: the name of that dtype, `StoredArray.dtype`.
        where: the array's path, for the message.

    Raises:
        UnsupportedLeafError: PyTorch has no such dtype.
    """
    dtype = _dtype_named(name, where)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    held = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return held.view(dtype).reshape(array.shape)


def _dtype_named(name: str, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedLeafError(
            f"restore {where}: expected a dtype of PyTorch, found {name}; read it as an array of "
            "NumPy"
        )
    return dtype


def piece(held: torch.Tensor, region: Region, outer: Region) -> torch.Tensor:
    """Return the elements of `region` of a tensor that holds exactly `outer`."""
    if region == outer:
        return held
    for axis, (start, extent) in enumerate(zip(region[0], region_shape(region), strict=True)):
        offset = start - outer[0][axis]
        if (offset, extent) != (0, held.shape[axis]):
            held = held.narrow(axis, offset, extent)
    return held
