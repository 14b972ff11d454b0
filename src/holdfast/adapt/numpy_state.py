"""States of NumPy arrays and Python values: snapshots and restores without a framework.

A program of this kind is a job of one process: there is no service by which several could find
each other. The arrays may change as soon as `save` returns, so a snapshot borrows them until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from holdfast.adapt import leaves
from holdfast.adapt.contract import (
    DeviceRange,
    HeldState,
    Hold,
    Mark,
    Outline,
    OwnProcess,
    PinnedMemory,
    Pinning,
    Processes,
    Restoration,
    RestoreRequest,
    Snapshot,
)
from holdfast.adapt.like import LikeRestoration, LikeState, NumpyArrayLeaves
from holdfast.adapt.nested import NestedRestoration
from holdfast.adapt.tree import Tree, flatten
from holdfast.errors import InvalidArgumentError, UnsupportedLeafError
from holdfast.format.grid import slices_within
from holdfast.format.layout import Chunk
from holdfast.format.paths import Path, path_name
from holdfast.format.records import CheckpointSpec

FOREIGN = "holdfast.CheckpointManager(..., framework='jax')"


class NumpyFramework:
    """Trees of dicts, lists, tuples and namedtuples of NumPy arrays, values and objects."""

    def __init__(self) -> None:
        self._outlines = leaves.Outlines(_no_outline, lambda leaf: None)

    def processes(self) -> Processes:
        return OwnProcess()

    def snapshot(self, state: object) -> Snapshot:
        tree = flatten(state, "save")
        return _NumpySnapshot(tree, self._outline(tree))

    def hold(self, state: object) -> HeldState:
        raise InvalidArgumentError(
            "ProcessHooks(keep_last=True): expected a state of JAX or PyTorch, found one of NumPy, "
            "whose changes nothing counts; save more often, to RAM alone, by "
            "RamTier(save_decision_policy=...)"
        )

    def pinning(self, state: object) -> Pinning:
        return _not_pinned

    def outline(self, state: object) -> Outline:
        return self._outline(flatten(state, "save"))

    def watch_compilations(self, report: Callable[[float], None]) -> Callable[[], None]:
        return lambda: None  # NumPy compiles nothing.

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> Restoration:
        if request.like is None:
            return NestedRestoration(spec, request)
        tree = flatten(request.like, request.call)
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            _refuse_foreign(leaf, request.call, path_name(path))
        like = LikeState(
            leaves=tree.leaves,
            paths=tree.paths,
            containers=tree.containers,
            unflatten=tree.unflatten,
        )
        return LikeRestoration(spec, like, request, NumpyArrayLeaves())

    def _outline(self, tree: Tree) -> Outline:
        structure = tree.paths, tree.containers
        return self._outlines.find(tree.leaves, tree.paths, tree.containers, structure)


class _NumpySnapshot:
    """A state whose arrays are borrowed until the call that takes the snapshot ends."""

    on_devices: frozenset[int] = frozenset()

    def __init__(self, tree: Tree, outline: Outline) -> None:
        self.outline = outline
        self.hold = Hold.BORROWED
        self.pin: Pinning = _not_pinned
        others = leaves.SavedValues()
        self._arrays: list[np.ndarray] = []
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            if leaves.is_numpy(leaf):
                self._arrays.append(leaves.host_array(leaf))
            else:
                others.encode_value(leaf, path)
        self.values, self.process_values = others.values, others.process_values
        self.marks: tuple[Mark, ...] = (None,) * len(self._arrays)

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        array = self._arrays[chunk.array_index]
        whole = (0,) * array.ndim, array.shape
        return leaves.bytes_of(array[slices_within((chunk.start, chunk.stop), whole)])

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        return {}

    def copy_borrowed(self) -> None:
        self._arrays = [leaves.owned_copy(array) for array in self._arrays]
        self.hold = Hold.HOST

    def check_unchanged(self) -> None:
        # No array is on a device.
        return

    def at_fence(self, finish: Callable[[], None]) -> bool:
        # Nothing reports that a program is about to write to an array.
        return False

    def release(self) -> None:
        self._arrays = []
        self.hold = Hold.HOST


def _not_pinned(memory: memoryview) -> PinnedMemory | None:
    return None


def _no_outline(leaf: Any, path: Path) -> None:
    _refuse_foreign(leaf, "save", path_name(path))


def _refuse_foreign(leaf: Any, call: str, name: str) -> None:
    """Raise for an array of JAX, whose framework was not chosen when the manager was made."""
    if type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise UnsupportedLeafError(
            f"{call} {name}: expected a NumPy array or a Python value, found "
            f"{type(leaf).__qualname__} of JAX, which was not imported when the framework was "
            f"chosen; import jax before, or pass {FOREIGN}"
        )
