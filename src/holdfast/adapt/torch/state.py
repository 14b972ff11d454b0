"""PyTorch states: snapshots, and states filled from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.adapt import leaves
from holdfast.adapt.contract import (
    DeviceRange,
    Hold,
    Mark,
    Outline,
    PinnedMemory,
    Pinning,
    Processes,
    Restoration,
    RestoreRequest,
    Snapshot,
)
from holdfast.adapt.nested import NestedRestoration
from holdfast.adapt.torch import tensors
from holdfast.adapt.torch.processes import TorchProcesses
from holdfast.adapt.torch.restore import filling
from holdfast.adapt.torch.tree import TorchTree, flatten, tied
from holdfast.format.grid import Region, slices_within
from holdfast.format.layout import Chunk
from holdfast.format.paths import path_name
from holdfast.format.records import ArraySpec, CheckpointSpec


class TorchFramework:
    """PyTorch as a framework: trees of tensors, modules, optimizers, values and objects."""

    def __init__(self) -> None:
        self._outlines = leaves.Outlines(
            lambda leaf, path: tensors.outline_of(leaf, path) if tensors.is_tensor(leaf) else None,
            tensors.signature,
        )

    def processes(self) -> Processes:
        return TorchProcesses()

    def snapshot(self, state: object) -> Snapshot:
        tree = flatten(state, "save")
        aliases = tied(tree.leaves)
        return _TorchSnapshot(tree, aliases, self._outline(tree, aliases))

    def outline(self, state: object) -> Outline:
        tree = flatten(state, "save")
        return self._outline(tree, tied(tree.leaves))

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> Restoration:
        if request.like is None:
            return NestedRestoration(spec, request, _tensor_of)
        return filling(spec, request)

    def _outline(self, tree: TorchTree, aliases: Sequence[int | None]) -> Outline:
        own = [i for i, of in enumerate(aliases) if of is None]
        ties = tuple(
            (tree.paths[i], tree.paths[of]) for i, of in enumerate(aliases) if of is not None
        )
        kinds = tuple((container.path, container.kind) for container in tree.containers)
        return self._outlines.find(
            [tree.leaves[i] for i in own],
            [tree.paths[i] for i in own],
            tree.containers,
            (tree.paths, kinds, ties),
            ties,
        )


class _TorchSnapshot:
    """A state whose tensors are borrowed until the call that takes the snapshot ends.

    Tensors change in place, also where nothing reports it (`.data`, a kernel that is given an
    address), so all are copied before the training continues.
    """

    on_devices: frozenset[int] = frozenset()

    def __init__(self, tree: TorchTree, aliases: Sequence[int | None], outline: Outline) -> None:
        self.outline = outline
        self.hold = Hold.BORROWED
        self.pin: Pinning = _not_pinned
        others = leaves.SavedValues()
        self._pieces: list[tuple[Any, Region]] = []
        for path, leaf, alias in zip(tree.paths, tree.leaves, aliases, strict=True):
            if alias is not None:
                continue
            if isinstance(leaf, torch.Tensor):
                self._pieces.append((tensors.local(leaf), tensors.region_held(leaf)))
            elif leaves.is_numpy(leaf):
                array = leaves.host_array(leaf)
                self._pieces.append((array, ((0,) * array.ndim, array.shape)))
            else:
                others.encode_value(leaf, path)
        self.values, self.process_values = others.values, others.process_values
        self.marks: tuple[Mark, ...] = (None,) * len(self._pieces)

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        held, outer = self._pieces[chunk.array_index]
        region = chunk.start, chunk.stop
        if isinstance(held, np.ndarray):
            return leaves.bytes_of(held[slices_within(region, outer)])
        return tensors.host_bytes(tensors.piece(held, region, outer))

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        return {}

    def copy_borrowed(self) -> None:
        self._pieces = [
            (
                leaves.owned_copy(held)
                if isinstance(held, np.ndarray)
                else held.resolve_conj().resolve_neg().to("cpu", copy=True),
                region,
            )
            for held, region in self._pieces
        ]
        self.hold = Hold.HOST

    def at_fence(self, finish: Callable[[], None]) -> bool:
        # Buffers change in the forward pass already, which no hook reports.
        return False

    def release(self) -> None:
        self._pieces = []
        self.hold = Hold.HOST


def _tensor_of(array: np.ndarray, spec: ArraySpec) -> torch.Tensor:
    return tensors.tensor_of(array, spec.dtype, path_name(spec.path))


def _not_pinned(memory: memoryview) -> PinnedMemory | None:
    return None
