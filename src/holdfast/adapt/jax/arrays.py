"""JAX arrays: where their pieces are, their bytes on the host, and arrays made of host buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.errors import UnsupportedLeafError
from holdfast.format.dtypes import dtype_name
from holdfast.format.grid import Region, chunk_count, chunk_region, region_shape
from holdfast.format.paths import Path, path_name
from holdfast.format.placement import Placement

ALIGNMENT_BYTES = 64
PAGE_SIZE_BYTES = 4096
LARGE_SIZE_BYTES = 1024 * 1024
_BUFFER_KINDS = "biufc"
"""The kinds of NumPy's own dtypes: of others, as bfloat16, JAX exports no buffer."""


def is_key(leaf: Any) -> bool:
    """Return whether an array or a ShapeDtypeStruct is of typed PRNG keys."""
    return _is_key_type(leaf.dtype)


@lru_cache(maxsize=256)
def _is_key_type(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def check_usable(
    leaves: Sequence[Any], paths: Sequence[Path], call: str, *, keys_alone: bool = False
) -> None:
    """Check that JAX's arrays among `leaves` have values: that they are not traced, nor deleted.

    It asks each array, so it is for states that are looked at once, and for those that failed.

    Args:
        leaves: of a state.
        paths: theirs, in the same order.
        call: the method of the manager that was given them.
        keys_alone: of deleted arrays, refuse typed PRNG keys alone; the others tell their sharding.

    Raises:
        UnsupportedLeafError: one of them has none.
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


def key_impl_name(leaf: Any) -> str:
    """Return the name of the implementation of typed PRNG keys."""
    # A ShapeDtypeStruct has no values to ask; its dtype is `key<name>` in full.
    return str(leaf.dtype._impl.name)


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """A device's index into an array, as a region."""
    bounds = [s.indices(d)[:2] for s, d in zip(index, shape, strict=True)]
    return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


def placement(array: jax.Array, path: Path) -> Placement:
    """Return the chunks of `array` and who holds them, among all processes.

    Raises:
        UnsupportedLeafError: its dtype cannot be stored, or its shards are no regular grid.
    """
    name = dtype_name(np.dtype(array.dtype))
    if name is None:
        raise UnsupportedLeafError(
            f"save {path_name(path)}: JAX dtype {array.dtype} cannot be stored; convert it"
        )
    found = _placement(array.sharding, array.shape, array.is_fully_addressable)
    if found is None:
        raise UnsupportedLeafError(
            f"save {path_name(path)}: expected shards that form a regular grid, found "
            f"{array.sharding} of shape {array.shape}; reshard it to a NamedSharding"
        )
    chunk_shape, holders = found
    return Placement(shape=array.shape, dtype=name, chunk_shape=chunk_shape, holders=holders)


_Placed = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@lru_cache(maxsize=4096)
def _placement(sharding: Any, shape: tuple[int, ...], addressable: bool) -> _Placed | None:
    if addressable and jax.process_count() > 1:
        # Every process has an array of its own here; they are taken to be the same.
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
    """Return the chunks of an array that `placement` knows."""
    found = _placement(sharding, shape, addressable)
    if found is None:
        return set()
    chunk_shape = found[0]
    count = chunk_count(shape, chunk_shape)
    return {chunk_region(shape, chunk_shape, i) for i in range(count)}


def memory_of(array: jax.Array) -> memoryview | None:
    """All of `array` where it is, if the host can see it there in one piece, in C order.

    Not by NumPy's own way: whether `array` then keeps the view, and its memory from being
    donated, is JAX's affair (0.10.2 does not). And this takes half the time of `host_views`, which
    counts where arrays are many.
    """
    if array.dtype.kind in _BUFFER_KINDS and len(array.sharding.device_set) == 1:
        try:
            memory = memoryview(array)
        except BufferError:
            return None  # It is not the host's.
        if memory.nbytes and memory.c_contiguous:
            return memory
    return None


def host_views(array: jax.Array) -> dict[Region, np.ndarray]:
    """The pieces of `array` that this process holds, by region; views where memory is shared."""
    if len(array.sharding.device_set) == 1:
        # Not of `array` itself; see `memory_of`.
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
    """Return the region that is all of `array`."""
    return (0,) * array.ndim, tuple(array.shape)


def _is_regular(array: jax.Array) -> bool:
    """Return whether an array on several devices is cut into chunks that `placement` knows."""
    found = _placement(array.sharding, array.shape, True)
    return found is not None and found[0] != array.shape


def aligned_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose memory XLA can take over on the CPU without a copy.

    A large one begins with a page, so that a disk can write into it without a copy too.
    """
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    alignment = ALIGNMENT_BYTES if size_bytes < LARGE_SIZE_BYTES else PAGE_SIZE_BYTES
    raw = np.empty(size_bytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def assembled(shape: tuple[int, ...], like: Any, buffers: dict[Region, np.ndarray]) -> jax.Array:
    """An array with the sharding of `like`, made of the pieces that this process needs."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or not getattr(like, "committed", True):
        # Uncommitted, as `like` is: a jitted step that took `like` takes this without compiling.
        (buffer,) = buffers.values()
        alone: jax.Array = jax.device_put(buffer)
        return alone
    pieces = [
        jax.device_put(buffers[region_of(index, shape)], device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    made: jax.Array = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
    return made


def regions_needed(shape: tuple[int, ...], like: Any) -> list[Region]:
    """The regions of an array that this process needs to make one that is sharded like `like`."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or not getattr(like, "committed", True):
        return [((0,) * len(shape), shape)]
    indices = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(region_of(index, shape) for index in indices))
