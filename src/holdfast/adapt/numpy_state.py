"""States of NumPy arrays and Python values: snapshots and restores without a framework.

A program of this kind is a job of one process: there is no service by which several could find
each other. The arrays may change as soon as `save` returns, so a snapshot copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.adapt import leaves
from holdfast.adapt.contract import (
    ArrayOutline,
    DeviceRange,
    KeyValues,
    Mark,
    Outline,
    PinnedMemory,
    Pinning,
    Processes,
    Restoration,
    RestoreRequest,
    Snapshot,
)
from holdfast.adapt.like import ArrayType, LikeRestoration, LikeState
from holdfast.adapt.nested import NestedRestoration
from holdfast.adapt.numpy_tree import Tree, flatten
from holdfast.errors import UnsupportedLeafError
from holdfast.format.grid import Region, slices_within
from holdfast.format.layout import Chunk
from holdfast.format.paths import path_name
from holdfast.format.placement import Placement
from holdfast.format.records import ArraySpec, CheckpointSpec, SavedValue
from holdfast.format.values import encode_value

OUTLINES_MAX = 8
FOREIGN = "holdfast.CheckpointManager(..., framework='jax')"


class NumpyFramework:
    """Trees of dicts, lists, tuples and namedtuples of NumPy arrays, values and objects."""

    def __init__(self) -> None:
        self._outlines: dict[Any, Outline] = {}

    def processes(self) -> Processes:
        return OwnProcess()

    def snapshot(self, state: object) -> Snapshot:
        tree = flatten(state, "save")
        return _NumpySnapshot(tree, self._outline(tree))

    def outline(self, state: object) -> Outline:
        return self._outline(flatten(state, "save"))

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> Restoration:
        if request.like is None:
            return NestedRestoration(spec, request)
        tree = flatten(request.like, "restore")
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            _refuse_foreign(leaf, "restore", path_name(path))
        like = LikeState(leaves=tree.leaves, paths=tree.paths, unflatten=tree.unflatten)
        return LikeRestoration(spec, like, request, NoArrayLeaves())

    def _outline(self, tree: Tree) -> Outline:
        # The same structure gives the same object, so that a run is planned once.
        kinds = tuple((container.path, container.kind) for container in tree.containers)
        key = (tree.paths, kinds, tuple(map(_signature, tree.leaves)))
        known = self._outlines.get(key)
        if known is None:
            known = _make_outline(tree)
            if len(self._outlines) >= OUTLINES_MAX:
                self._outlines.clear()
            self._outlines[key] = known
        return known


class OwnProcess:
    """A job of one process; see `holdfast.adapt.contract.Processes`."""

    rank = 0
    count = 1
    slice_index = None

    def key_values(self) -> KeyValues:
        raise AssertionError("a job of one process shares no values")


class NoArrayLeaves:
    """See `holdfast.adapt.like.ArrayLeaves`: there are no arrays but NumPy's."""

    def type_of(self, leaf: Any) -> ArrayType | None:
        return None

    def has_value(self, leaf: Any) -> bool:
        raise AssertionError("NumPy's arrays are handled by the restoration itself")

    def buffers(self, leaf: Any, array: ArraySpec, dtype: np.dtype) -> dict[Region, np.ndarray]:
        raise AssertionError("NumPy's arrays are handled by the restoration itself")

    def assembled(self, leaf: Any, array: ArraySpec, buffers: dict[Region, np.ndarray]) -> Any:
        raise AssertionError("NumPy's arrays are handled by the restoration itself")


class _NumpySnapshot:
    """A copy of a state's arrays, values and states of objects."""

    is_on_host = True
    is_borrowed = False

    def __init__(self, tree: Tree, outline: Outline) -> None:
        self.outline = outline
        self.pin: Pinning = _not_pinned
        values, process_values = [], []
        self._arrays: list[np.ndarray] = []
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            if leaves.is_numpy(leaf):
                self._arrays.append(leaves.owned_copy(leaf))
            elif leaves.is_value(leaf):
                values.append(SavedValue(path=path, value=encode_value(leaf, path_name(path))))
            else:
                state = encode_value(leaves.state_of(leaf), path_name(path))
                process_values.append(SavedValue(path=path, value=state))
        self.values = tuple(values)
        self.process_values = tuple(process_values)
        self.marks: tuple[Mark, ...] = (None,) * len(self._arrays)

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        array = self._arrays[chunk.array_index]
        whole = (0,) * array.ndim, array.shape
        return leaves.bytes_of(array[slices_within((chunk.start, chunk.stop), whole)])

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        return {}

    def bring_to_host(self) -> None:
        """Do nothing: all bytes are in the host's memory."""

    def release(self) -> None:
        self._arrays = []


def _not_pinned(memory: memoryview) -> PinnedMemory | None:
    return None


def _signature(leaf: Any) -> Any:
    if leaves.is_numpy(leaf):
        return leaf.shape, leaf.dtype.str, leaf.dtype.name, type(leaf)
    return type(leaf)


def _make_outline(tree: Tree) -> Outline:
    arrays, process_values = [], []
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        _refuse_foreign(leaf, "save", path_name(path))
        if leaves.is_numpy(leaf):
            placed = Placement(
                shape=leaf.shape,
                dtype=leaves.numpy_dtype_name(leaf, path),
                chunk_shape=leaf.shape,
                holders=((0,),),
            )
            scalar = isinstance(leaf, np.generic)
            arrays.append(ArrayOutline(path=path, placement=placed, prng_impl=None, scalar=scalar))
        elif leaves.keeps_state(leaf):
            process_values.append(path)
        elif not leaves.is_value(leaf):
            encode_value(leaf, path_name(path))
            raise UnsupportedLeafError(
                f"save {path_name(path)}: {type(leaf).__qualname__} cannot be a leaf of a state "
                "of NumPy arrays; save what it holds"
            )
    return Outline(
        arrays=tuple(arrays), containers=tree.containers, process_values=tuple(process_values)
    )


def _refuse_foreign(leaf: Any, call: str, name: str) -> None:
    """Raise for an array of JAX, whose framework was not chosen when the manager was made."""
    if type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise UnsupportedLeafError(
            f"{call} {name}: expected a NumPy array or a Python value, found "
            f"{type(leaf).__qualname__} of JAX, which was not imported when the framework was "
            f"chosen; import jax before, or pass {FOREIGN}"
        )
