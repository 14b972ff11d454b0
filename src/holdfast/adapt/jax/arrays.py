"""JAX arrays: the location of their pieces, their bytes, and arrays built from host buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.adapt.jax import internals
from holdfast.errors import UnsupportedLeafError
from holdfast.format.dtypes import dtype_name
from holdfast.format.grid import Placement, Region, chunk_count, chunk_region, region_shape
from holdfast.format.paths import Path, path_name

ALIGNMENT_BYTES = 64
PAGE_SIZE_BYTES = 4096
LARGE_SIZE_BYTES = 1024 * 1024
COPIED_SIZE_BYTES = 64 * 1024
"""Below this size JAX copies a buffer and adopts no memory, whatever the alignment."""
HOST_PLATFORMS = {"cpu"}
"""JAX's platforms whose arrays are in the host's memory."""
_BUFFER_KINDS = "biufc"
"""The kinds of NumPy's own dtypes. JAX exports no buffer of others, such as bfloat16."""


def device_of(array: jax.Array) -> Any:
    """Return one of the devices of an array."""
    return next(iter(array.sharding.device_set))


def is_on_device(array: jax.Array) -> bool:
    """Return whether an array is in a device's memory, and not in the host's."""
    return device_of(array).platform not in HOST_PLATFORMS


def is_key(leaf: Any) -> bool:
    """Return whether an array or a ShapeDtypeStruct is of typed PRNG keys."""
    return _is_key_type(leaf.dtype)


@lru_cache(maxsize=256)
def _is_key_type(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def check_usable(
    leaves: Sequence[Any], paths: Sequence[Path], call: str, *, keys_alone: bool = False
) -> None:
    """Check that the JAX arrays among `leaves` have values: they are not traced or deleted.

    This queries each array, which is slow: call it once per state, or after an error.

    Args:
        leaves: the leaves of a state.
        paths: their paths, in the same order.
        call: the method of the manager that received them, for messages.
        keys_alone: of deleted arrays, refuse only typed PRNG keys; others still have a sharding.

    Raises:
        UnsupportedLeafError: one of them has no values.
    """
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, jax.Array):
            continue
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: expected an array, found a tracer: {call} was called "
                "inside a traced function (jit, grad, vmap or scan); call it outside, on what the "
                "function returns"
            )
        if leaf.is_deleted() and (is_key(leaf) or not keys_alone):
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: expected an array, found one that was deleted or "
                "donated; pass the array that the donating function has returned"
            )


def is_weak(leaf: Any) -> bool:
    """Return whether an array, or a stand-in for one, is weakly typed, as a Python number is."""
    return bool(getattr(leaf, "weak_type", False))


def key_impl_name(leaf: Any) -> str:
    """Return the name of the implementation of typed PRNG keys."""
    return internals.key_impl_name(leaf.dtype)


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return a device's index into an array as a region."""
    bounds = [s.indices(d)[:2] for s, d in zip(index, shape, strict=True)]
    return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


def placement(array: jax.Array, path: Path) -> Placement:
    """Return the chunks of `array` and the processes that hold them.

    Raises:
        UnsupportedLeafError: its dtype cannot be stored, or its shards are not a regular grid.
    """
    name = dtype_name(np.dtype(array.dtype))
    if name is None:
        raise UnsupportedLeafError(
            f"save {path_name(path)}: JAX dtype {array.dtype} cannot be stored; convert it"
        )
    placed = _placement(array.sharding, array.shape, array.is_fully_addressable)
    if placed is None:
        raise UnsupportedLeafError(
            f"save {path_name(path)}: expected shards that form a regular grid, found "
            f"{array.sharding} of shape {array.shape}; reshard it to a NamedSharding"
        )
    chunk_shape, holders = placed
    return Placement(shape=array.shape, dtype=name, chunk_shape=chunk_shape, holders=holders)


_Placed = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@lru_cache(maxsize=4096)
def _placement(sharding: Any, shape: tuple[int, ...], addressable: bool) -> _Placed | None:
    if addressable and jax.process_count() > 1:
        # Every process has its own array here; they are assumed to be equal.
        return shape, ((0,),)
    ranks: dict[Region, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        region = region_of(index, shape)
        ranks.setdefault(region, set()).add(device.process_index if not addressable else 0)
    first = min(ranks)
    chunk_shape = region_shape(first)
    count = chunk_count(shape, chunk_shape)
    regions = [chunk_region(shape, chunk_shape, i) for i in range(count)]
    if set(regions) != set(ranks):
        return (shape, ((0,),)) if addressable else None
    return chunk_shape, tuple(tuple(sorted(ranks[region])) for region in regions)


def chunk_regions(sharding: Any, shape: tuple[int, ...], addressable: bool) -> set[Region]:
    """Return the regions of the chunks of an array that `placement` accepts."""
    placed = _placement(sharding, shape, addressable)
    if placed is None:
        return set()
    chunk_shape = placed[0]
    count = chunk_count(shape, chunk_shape)
    return {chunk_region(shape, chunk_shape, i) for i in range(count)}


def memory_of(array: jax.Array) -> memoryview | None:
    """Return the memory of `array`, if it is contiguous host memory in C order; else None.

    Uses the buffer protocol rather than `np.asarray`: whether JAX caches NumPy's view, and so
    prevents a donation of the memory, depends on its version (0.10.2 does not). It also takes half
    the time of `host_views`, which matters for states of many arrays.
    """
    if array.dtype.kind in _BUFFER_KINDS and len(array.sharding.device_set) == 1:
        try:
            memory = memoryview(array)
        except BufferError:
            return None  # Not host memory.
        if memory.nbytes and memory.c_contiguous:
            return memory
    return None


def host_views(array: jax.Array) -> dict[Region, np.ndarray]:
    """Return the pieces of `array` that this process holds, by region; views where possible."""
    if len(array.sharding.device_set) == 1:
        # A view of the shard, not of `array` itself; see `memory_of`.
        return {whole(array): np.asarray(array.addressable_data(0))}
    if array.is_fully_addressable and not _is_regular(array):
        return {whole(array): np.asarray(array)}
    views: dict[Region, np.ndarray] = {}
    for shard in array.addressable_shards:
        region = region_of(shard.index, array.shape)
        if region not in views:
            views[region] = np.asarray(shard.data)
    return views


def whole(array: jax.Array | np.ndarray) -> Region:
    """Return the region of the whole `array`."""
    return (0,) * array.ndim, tuple(array.shape)


def _is_regular(array: jax.Array) -> bool:
    """Return whether an array on several devices has shards that `placement` accepts."""
    placed = _placement(array.sharding, array.shape, True)
    return placed is not None and placed[0] != array.shape


def aligned_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose memory XLA on the CPU can adopt without a copy.

    A large array starts at a page boundary, so that a direct read can fill it without a copy too.
    A small one is copied in any case.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < COPIED_SIZE_BYTES:
        return np.empty(shape, dtype)
    alignment = ALIGNMENT_BYTES if size_bytes < LARGE_SIZE_BYTES else PAGE_SIZE_BYTES
    raw = np.empty(size_bytes + alignment, np.uint8)
    start = -raw.__array_interface__["data"][0] % alignment
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


class Pieces(NamedTuple):
    """The pieces of an array that this process holds, by region; `like` has its sharding."""

    shape: tuple[int, ...]
    like: Any
    buffers: dict[Region, np.ndarray]


def assembled(arrays: Sequence[Pieces]) -> list[jax.Array]:
    """Return arrays with the shardings of their `like`, in the order given.

    JAX is called once for the pieces of all arrays: a call for each costs more than a small piece.
    """
    placed = [_placed(one) for one in arrays]
    put = iter(_put([*chain.from_iterable(placed)]))
    return [
        _joined(one, [*islice(put, len(of_array))])
        for one, of_array in zip(arrays, placed, strict=True)
    ]


def _placed(one: Pieces) -> list[tuple[np.ndarray, Any]]:
    """Return the buffers to put on devices, each with its device or sharding.

    None stands for JAX's default device, without commitment.
    """
    sharding = _sharding_of(one.like)
    if sharding is None or _has_one_device(sharding):
        return [(buffer, sharding) for buffer in one.buffers.values()]
    indices = sharding.addressable_devices_indices_map(one.shape)
    return [(one.buffers[region_of(index, one.shape)], device) for device, index in indices.items()]


def _put(pieces: Sequence[tuple[np.ndarray, Any]]) -> list[jax.Array]:
    # `jnp.asarray` would compile a program for each new shape, 11 ms a piece.
    alone = iter(jax.device_put([buffer for buffer, place in pieces if place is None]))
    placed = [(buffer, place) for buffer, place in pieces if place is not None]
    put = iter(jax.device_put([buffer for buffer, _ in placed], [place for _, place in placed]))
    return [next(alone if place is None else put) for _, place in pieces]


def _joined(one: Pieces, pieces: list[jax.Array]) -> jax.Array:
    sharding = _sharding_of(one.like)
    if sharding is None or _has_one_device(sharding):
        return pieces[0]
    # A process that holds no piece knows the dtype from `like` alone.
    dtype = pieces[0].dtype if pieces else one.like.dtype
    array: jax.Array = jax.make_array_from_single_device_arrays(
        one.shape, sharding, pieces, dtype=dtype
    )
    return array


def _sharding_of(like: Any) -> Any:
    """Return the sharding of an array or a stand-in for one; None if it is uncommitted.

    What is restored is then uncommitted too: a step that was compiled for `like` is not compiled
    again.
    """
    return getattr(like, "sharding", None) if getattr(like, "committed", True) else None


def _has_one_device(sharding: Any) -> bool:
    """Return whether a sharding has one device, and that is this process's."""
    return bool(sharding.is_fully_addressable) and len(sharding.device_set) == 1


def regions_needed(shape: tuple[int, ...], like: Any) -> list[Region]:
    """Return the regions that this process needs to build an array sharded like `like`."""
    sharding = _sharding_of(like)
    if sharding is None:
        return [((0,) * len(shape), shape)]
    indices = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(region_of(index, shape) for index in indices))
