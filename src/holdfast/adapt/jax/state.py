"""JAX states: snapshots, and states built from a checkpoint."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from holdfast.adapt import leaves
from holdfast.adapt.contract import (
    ArrayOutline,
    DeviceRange,
    HeldState,
    Hold,
    Mark,
    Outline,
    Pinning,
    Processes,
    Restoration,
    RestoreRequest,
    Snapshot,
)
from holdfast.adapt.jax import arrays as jax_arrays
from holdfast.adapt.jax.compilation import watch_compilations
from holdfast.adapt.jax.devices import JaxDevices
from holdfast.adapt.jax.internals import check_internals
from holdfast.adapt.jax.processes import JaxProcesses
from holdfast.adapt.jax.restore import like_restoration, whole_array
from holdfast.adapt.jax.tree import Structure, flatten
from holdfast.adapt.nested import NestedRestoration
from holdfast.errors import DeviceError
from holdfast.format.grid import Region, enclosing_chunk, slices_within
from holdfast.format.layout import Chunk
from holdfast.format.paths import Path, path_name
from holdfast.format.records import CheckpointSpec
from holdfast.garbage import nothing_collected

log = logging.getLogger(__name__)


class JaxFramework:
    """JAX as a framework: any pytree of arrays, values and stateful objects."""

    def __init__(self) -> None:
        check_internals()
        self._outlines = leaves.Outlines(_array_outline, _signature)
        self._devices = JaxDevices()

    def processes(self) -> Processes:
        return JaxProcesses()

    def snapshot(self, state: object) -> Snapshot:
        with nothing_collected():
            return self.snapshot_of(*flatten(state))

    def snapshot_of(
        self,
        found: list[Any],
        structure: Structure,
        others: leaves.SavedValues | None = None,
    ) -> Snapshot:
        """Return a snapshot of the leaves of a state.

        Args:
            found: The leaves.
            structure: Where they are.
            others: Those that are no arrays, if they were encoded before.

        Raises:
            UnsupportedLeafError: A leaf cannot be saved.
        """
        with nothing_collected():
            try:
                outline = self._outline(found, structure)
                return _JaxSnapshot(found, structure, outline, self._devices, others)
            except (AttributeError, DeviceError, RuntimeError, TypeError, ValueError):
                # Only after an error: checking each array for deletion first would double the cost.
                jax_arrays.check_usable(found, structure.paths, "save")
                raise

    def hold(self, state: object) -> HeldState:
        with nothing_collected():
            return _JaxHeldState(*flatten(state), self)

    def outline(self, state: object) -> Outline:
        values, structure = flatten(state)
        jax_arrays.check_usable(values, structure.paths, "save")
        return self._outline(values, structure)

    def pinning(self, state: object) -> Pinning:
        values, _ = flatten(state)
        self._devices.expect([leaf for leaf in values if isinstance(leaf, jax.Array)])
        return self._devices.pin

    def watch_compilations(self, report: Callable[[float], None]) -> Callable[[], None]:
        return watch_compilations(report)

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> Restoration:
        if request.like is None:
            return NestedRestoration(spec, request, whole_array)
        return like_restoration(spec, request)

    def _outline(self, found: list[Any], structure: Structure) -> Outline:
        return self._outlines.find(found, structure.paths, structure.containers, structure.treedef)


def _signature(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return None
    return leaf.shape, leaf.dtype, leaf.sharding, jax_arrays.is_weak(leaf)


def _array_outline(leaf: Any, path: Path) -> ArrayOutline | None:
    if not isinstance(leaf, jax.Array):
        return None
    stored = jax.random.key_data(leaf) if jax_arrays.is_key(leaf) else leaf
    impl = jax_arrays.key_impl_name(leaf) if stored is not leaf else None
    placed = jax_arrays.placement(stored, path)
    return ArrayOutline(
        path=path,
        placement=placed,
        prng_impl=impl,
        scalar=False,
        weak_type=jax_arrays.is_weak(leaf),
        is_everywhere=stored.is_fully_addressable,
    )


class _JaxHeldState:
    """The state of one step, by reference; a donation may take its arrays.

    The values, and the states of objects, are those of the step.

    Raises:
        UnsupportedLeafError: A value cannot be saved.
    """

    def __init__(self, found: list[Any], structure: Structure, framework: JaxFramework) -> None:
        self._found, self._structure, self._framework = found, structure, framework
        self._others = leaves.SavedValues()
        for path, leaf in zip(structure.paths, found, strict=True):
            if not (isinstance(leaf, jax.Array) or leaves.is_numpy(leaf)):
                self._others.encode_value(leaf, path)

    def change(self) -> str:
        for path, leaf in zip(self._structure.paths, self._found, strict=True):
            if leaves.is_numpy(leaf):
                return f"{path_name(path)} is a NumPy array, whose changes are not counted"
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                return f"{path_name(path)} was donated to a computation, or deleted"
        return ""

    def snapshot(self) -> Snapshot:
        return self._framework.snapshot_of(self._found, self._structure, self._others)


class _JaxSnapshot:
    """A fixed JAX state.

    JAX arrays are immutable; memory that a donation would take is held. NumPy arrays, values and
    the states of objects are copied here, since their owners may change them once this returns.
    """

    def __init__(
        self,
        found: list[Any],
        structure: Structure,
        outline: Outline,
        devices: JaxDevices,
        others: leaves.SavedValues | None,
    ) -> None:
        self.outline = outline
        self._pieces: list[dict[Region, np.ndarray] | memoryview] = []
        encoded = leaves.SavedValues() if others is None else others
        arrays: list[Any] = []
        marks: list[Mark] = []
        for path, leaf in zip(structure.paths, found, strict=True):
            if isinstance(leaf, jax.Array):
                arrays.append(jax.random.key_data(leaf) if jax_arrays.is_key(leaf) else leaf)
                marks.append(weakref.ref(leaf))
            elif leaves.is_numpy(leaf):
                arrays.append(leaves.owned_copy(leaf))
                marks.append(None)
            elif others is None:
                encoded.encode_value(leaf, path)
        self.values, self.process_values = encoded.values, encoded.process_values
        self.marks = tuple(marks)
        self._hold(arrays, devices)

    def _hold(self, arrays: list[Any], devices: JaxDevices) -> None:
        of_jax = {i: array for i, array in enumerate(arrays) if isinstance(array, jax.Array)}
        elsewhere = {i: array for i, array in of_jax.items() if jax_arrays.is_on_device(array)}
        self._on_devices = devices.fix_arrays(elsewhere) if elsewhere else None
        self.pin: Pinning = devices.pin
        self.on_devices = frozenset(elsewhere)
        self._pieces = []
        for i, array in enumerate(arrays):
            if i in elsewhere:
                self._pieces.append({})
            elif i in of_jax:
                # A view holds the array's memory, so nothing is copied here.
                memory = jax_arrays.memory_of(array)
                self._pieces.append(jax_arrays.host_views(array) if memory is None else memory)
            else:
                self._pieces.append({jax_arrays.whole(array): array})

    @property
    def hold(self) -> Hold:
        if self._on_devices is None:
            return Hold.HOST
        return Hold.BORROWED if self._on_devices.is_borrowed else Hold.DEVICE

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
            assert self._on_devices is not None
            # The device's copy is transferred to the host here, on the background thread.
            if shard != region:
                piece = self._on_devices.view_within(chunk.array_index, shard, region)
                return leaves.bytes_of(piece)
            pieces = self._on_devices.views(chunk.array_index)
            self._pieces[chunk.array_index] = pieces
        return leaves.bytes_of(pieces[shard][slices_within(region, shard)])

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        if self._on_devices is None:
            return {}
        elsewhere = set(self._on_devices.keys())
        self._on_devices.wait()
        ranges = {}
        for chunk in chunks:
            if chunk.size_bytes and chunk.array_index in elsewhere:
                region, shard = (chunk.start, chunk.stop), self._shard_of(chunk)
                offset_bytes = chunk.offset_bytes
                device_range = self._on_devices.range(
                    chunk.array_index, shard, region, offset_bytes
                )
                if device_range is not None:
                    ranges[chunk] = device_range
        return ranges

    def _shard_of(self, chunk: Chunk) -> Region:
        """Return the piece of the array that contains a chunk."""
        placed = self.outline.arrays[chunk.array_index].placement
        return enclosing_chunk(placed.shape, placed.chunk_shape, chunk.start)

    def at_fence(self, finish: Callable[[], None]) -> bool:
        # JAX reports no donation, so nothing is borrowed for longer than a call.
        return False

    def check_unchanged(self) -> None:
        # Arrays are immutable, and those that a donation would take are held.
        return

    def copy_borrowed(self) -> None:
        if self._on_devices is None:
            return
        try:
            for i in self._on_devices.keys():  # noqa: SIM118 - not a mapping
                self._pieces[i] = self._on_devices.views(i)
        except DeviceError as error:
            log.debug("a state was not copied to the host: %s", error)
            # The saver requests the remaining arrays again and reports the error.
            self._on_devices.is_borrowed = False
            return
        self._on_devices.release()
        self._on_devices = None

    def release(self) -> None:
        self._pieces = []
        if self._on_devices is not None:
            self._on_devices.release()
