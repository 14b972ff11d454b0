"""JAX states: snapshots of them, and states built from a checkpoint."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from holdfast.adapt import leaves
from holdfast.adapt.contract import (
    ArrayOutline,
    DeviceRange,
    Mark,
    Outline,
    Pinning,
    Restoration,
    Snapshot,
)
from holdfast.adapt.jax import arrays as jax_arrays
from holdfast.adapt.jax.devices import JaxDevices
from holdfast.adapt.jax.restore import LikeRestoration
from holdfast.adapt.jax.tree import Structure, flatten
from holdfast.adapt.nested import NestedRestoration
from holdfast.errors import DeviceError, UnsupportedLeafError
from holdfast.format.grid import Region, enclosing_chunk, slices_within
from holdfast.format.layout import Chunk
from holdfast.format.paths import Path, path_name
from holdfast.format.placement import Placement
from holdfast.format.records import CheckpointSpec, SavedValue
from holdfast.format.values import encode_value

log = logging.getLogger(__name__)


class JaxFramework:
    """JAX: any pytree of arrays, values and objects that keep a state."""

    def __init__(self) -> None:
        self._outlines: dict[Any, Outline] = {}
        self._devices = JaxDevices()

    def snapshot(self, state: object) -> Snapshot:
        with _nothing_collected():
            found, structure = flatten(state)
            try:
                outline = self._outline(found, structure)
                return _JaxSnapshot(found, structure, outline, self._devices)
            except (AttributeError, DeviceError, RuntimeError, TypeError, ValueError):
                # Asking each array beforehand whether it is deleted costs as much as all the rest.
                jax_arrays.check_usable(found, structure.paths, "save")
                raise

    def outline(self, state: object) -> Outline:
        found, structure = flatten(state)
        jax_arrays.check_usable(found, structure.paths, "save")
        return self._outline(found, structure)

    def restoration(self, spec: CheckpointSpec, like: object) -> Restoration:
        return NestedRestoration(spec) if like is None else LikeRestoration(spec, like)

    def _outline(self, found: list[Any], structure: Structure) -> Outline:
        key = (structure.treedef, tuple(map(_signature, found)))
        known = self._outlines.get(key)
        if known is None:
            known = _make_outline(found, structure)
            # A run has one structure, or few; a state that changes shape forever must not pile up.
            if len(self._outlines) >= 8:
                self._outlines.clear()
            self._outlines[key] = known
        return known


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python looks for no garbage meanwhile, in no thread.

    A state of 20,000 leaves makes so many objects, none of them garbage, that the training would
    wait longer for those looks than for all else that is done here.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    if leaves.is_numpy(leaf):
        return leaf.shape, leaf.dtype.str, leaf.dtype.name, type(leaf)
    return type(leaf)


def _make_outline(found: list[Any], structure: Structure) -> Outline:
    arrays, process_values = [], []
    for path, leaf in zip(structure.paths, found, strict=True):
        if isinstance(leaf, jax.Array):
            stored = jax.random.key_data(leaf) if jax_arrays.is_key(leaf) else leaf
            impl = jax_arrays.key_impl_name(leaf) if stored is not leaf else None
            placed = jax_arrays.placement(stored, path)
            outline = ArrayOutline(path=path, placement=placed, prng_impl=impl, scalar=False)
            arrays.append(outline)
        elif leaves.is_numpy(leaf):
            arrays.append(_numpy_outline(leaf, path))
        elif leaves.keeps_state(leaf):
            process_values.append(path)
        elif not leaves.is_value(leaf):
            encode_value(leaf, path_name(path))
            raise UnsupportedLeafError(
                f"save {path_name(path)}: {type(leaf).__qualname__} cannot be a leaf of a state; "
                "save what it holds"
            )
    return Outline(
        arrays=tuple(arrays),
        containers=structure.containers,
        process_values=tuple(process_values),
    )


def _numpy_outline(leaf: np.ndarray | np.generic, path: Path) -> ArrayOutline:
    placed = Placement(
        shape=leaf.shape,
        dtype=leaves.numpy_dtype_name(leaf, path),
        chunk_shape=leaf.shape,
        holders=((0,),),
    )
    scalar = isinstance(leaf, np.generic)
    return ArrayOutline(path=path, placement=placed, prng_impl=None, scalar=scalar)


class _JaxSnapshot:
    """A JAX state, fixed.

    JAX arrays do not change; what a donation would take away is held. NumPy arrays, values and the
    states of objects are copied here, since their owners may change them as soon as this returns.
    """

    def __init__(
        self, found: list[Any], structure: Structure, outline: Outline, devices: JaxDevices
    ) -> None:
        self.outline = outline
        self._pieces: list[dict[Region, np.ndarray] | memoryview] = []
        values, process_values = [], []
        arrays: list[Any] = []
        marks: list[Mark] = []
        for path, leaf in zip(structure.paths, found, strict=True):
            if isinstance(leaf, jax.Array):
                arrays.append(jax.random.key_data(leaf) if jax_arrays.is_key(leaf) else leaf)
                marks.append(weakref.ref(leaf))
            elif leaves.is_numpy(leaf):
                arrays.append(leaves.owned_copy(leaf))
                marks.append(None)
            elif leaves.is_value(leaf):
                values.append(SavedValue(path=path, value=encode_value(leaf, path_name(path))))
            else:
                state = encode_value(leaves.state_of(leaf), path_name(path))
                process_values.append(SavedValue(path=path, value=state))
        self.values = tuple(values)
        self.process_values = tuple(process_values)
        self.marks = tuple(marks)
        self._hold(arrays, devices)

    def _hold(self, arrays: list[Any], devices: JaxDevices) -> None:
        of_jax = {i: array for i, array in enumerate(arrays) if isinstance(array, jax.Array)}
        self._on_devices = devices.hold(of_jax)
        self.pin: Pinning = devices.pin
        elsewhere = set(self._on_devices.keys())
        self._pieces = []
        for i, array in enumerate(arrays):
            if i in elsewhere:
                self._pieces.append({})
            elif i in of_jax:
                # A view keeps the array's memory, so nothing is copied here.
                memory = jax_arrays.memory_of(array)
                self._pieces.append(jax_arrays.host_views(array) if memory is None else memory)
            else:
                self._pieces.append({jax_arrays.whole(array): array})
        self.is_on_host = not elsewhere

    @property
    def is_borrowed(self) -> bool:
        return self._on_devices.is_borrowed

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        pieces = self._pieces[chunk.array_index]
        if isinstance(pieces, memoryview):
            if pieces.nbytes == chunk.size_bytes:
                return pieces.cast("B")
            view = np.asarray(pieces)
            pieces = {jax_arrays.whole(view): view}
        region = chunk.start, chunk.stop
        if region in pieces:
            return leaves.bytes_of(pieces[region])
        shard = self._shard_of(chunk)
        if not pieces:
            # A device's copy comes to the host here, on the background thread.
            if shard != region:
                piece = self._on_devices.view_within(chunk.array_index, shard, region)
                return leaves.bytes_of(piece)
            pieces = self._on_devices.views(chunk.array_index)
            self._pieces[chunk.array_index] = pieces
        return leaves.bytes_of(pieces[shard][slices_within(region, shard)])

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        elsewhere = set(self._on_devices.keys())
        self._on_devices.wait()
        ranges = {}
        for chunk in chunks:
            if chunk.size_bytes and chunk.array_index in elsewhere:
                region, shard = (chunk.start, chunk.stop), self._shard_of(chunk)
                offset_bytes = chunk.offset_bytes
                found = self._on_devices.range(chunk.array_index, shard, region, offset_bytes)
                if found is not None:
                    ranges[chunk] = found
        return ranges

    def _shard_of(self, chunk: Chunk) -> Region:
        """The piece of the array that a chunk is, or is a part of."""
        placed = self.outline.arrays[chunk.array_index].placement
        return enclosing_chunk(placed.shape, placed.chunk_shape, chunk.start)

    def bring_to_host(self) -> None:
        try:
            for i in self._on_devices.keys():  # noqa: SIM118 - not a mapping
                self._pieces[i] = self._on_devices.views(i)
        except DeviceError as error:
            log.debug("a state was not brought to the host: %s", error)
            # What is left is asked for again, by whoever saves, and told there.
            self._on_devices.is_borrowed = False
            return
        self._on_devices.release()
        self.is_on_host = True

    def release(self) -> None:
        self._pieces = []
        self._on_devices.release()
