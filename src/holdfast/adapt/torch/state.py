"""PyTorch states: snapshots, and states filled from a checkpoint.

See docs/decisions/0026 and docs/decisions/0069.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.adapt import leaves
from holdfast.adapt.contract import (
    ArrayOutline,
    DeviceRange,
    Hold,
    Mark,
    Outline,
    Pinning,
    Processes,
    Restoration,
    RestoreRequest,
    Snapshot,
)
from holdfast.adapt.nested import NestedRestoration
from holdfast.adapt.torch import tensors
from holdfast.adapt.torch.compilation import CompilationTimes
from holdfast.adapt.torch.computed import Computed
from holdfast.adapt.torch.devices import Fence, Loan, TorchDevices, devices_of, is_on_device
from holdfast.adapt.torch.held_state import HeldState
from holdfast.adapt.torch.processes import TorchProcesses
from holdfast.adapt.torch.restore import filling
from holdfast.adapt.torch.tree import flatten, tied, updated_by_optimizers
from holdfast.adapt.tree import Tree
from holdfast.errors import DeviceError, HoldfastError, ProcessLostError
from holdfast.format.grid import Region, slices_within
from holdfast.format.layout import Chunk
from holdfast.format.paths import Path, path_name
from holdfast.format.records import ArraySpec, CheckpointSpec
from holdfast.garbage import nothing_collected


class TorchFramework:
    """PyTorch as a framework: trees of tensors, modules, optimizers, values and objects.

    Args:
        fence: what the training passes before it changes tensors on GPUs; None: the steps of its
            optimizers.
    """

    def __init__(self, fence: Fence | None = None) -> None:
        self._devices = TorchDevices(fence)
        self._outlines = leaves.Outlines(self._array_outline, tensors.signature)
        self._count: int | None = None
        """The number of processes of the job that saves; None outside of a job."""
        self._compilations: CompilationTimes | None = None

    def processes(self) -> Processes:
        processes = TorchProcesses()
        self._count = processes.count
        return processes

    def snapshot(self, state: object) -> Snapshot:
        self._listen()
        with nothing_collected():
            tree = flatten(state, "save")
            aliases = tied(tree.leaves)
            return _TorchSnapshot(tree, aliases, self._outline(tree, aliases), self._devices)

    def hold(self, state: object) -> HeldState:
        """Keep `state` by reference.

        Raises:
            UnsupportedLeafError: As `snapshot`.
        """
        with nothing_collected():
            tree = flatten(state, "save")
            aliases = tied(tree.leaves)
            outline = self._outline(tree, aliases)
            held = _TorchSnapshot(tree, aliases, outline, self._devices, lends=False)
            divided = [
                isinstance(leaf, torch.Tensor) and tensors.is_divided(leaf)
                for leaf, alias in zip(tree.leaves, aliases, strict=True)
                if alias is None and (isinstance(leaf, torch.Tensor) or leaves.is_numpy(leaf))
            ]
            return HeldState(held, held.pieces, divided, held.computed)

    def outline(self, state: object) -> Outline:
        self._listen()
        tree = flatten(state, "save")
        return self._outline(tree, tied(tree.leaves))

    def pinning(self, state: object) -> Pinning:
        self._devices.expect(filter(_is_on_device, flatten(state, "save").leaves))
        return self._devices.pin

    def watch_compilations(self, report: Callable[[float], None]) -> Callable[[], None]:
        self._compilations = CompilationTimes(report)
        self._compilations.listen()
        return self._compilations.stop

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> Restoration:
        self._listen()
        if request.like is None:
            return NestedRestoration(spec, request, _tensor_of)
        return filling(spec, request, self._count)

    def _listen(self) -> None:
        if self._compilations is not None:
            self._compilations.listen()

    def _array_outline(self, leaf: Any, path: Path) -> ArrayOutline | None:
        if not tensors.is_tensor(leaf):
            return None
        if self._count is not None:
            tensors.check_ranks(leaf, path, "save", self._count)
        return tensors.outline_of(leaf, path)

    def _outline(self, tree: Tree, aliases: Sequence[int | None]) -> Outline:
        own = [i for i, of in enumerate(aliases) if of is None]
        ties = tuple(
            (tree.paths[i], tree.paths[of]) for i, of in enumerate(aliases) if of is not None
        )
        return self._outlines.find(
            [tree.leaves[i] for i in own],
            [tree.paths[i] for i in own],
            tree.containers,
            (tree.paths, tree.containers, ties),
            ties,
        )


class _TorchSnapshot:
    """A state whose tensors are borrowed.

    Tensors change in place, also where nothing reports it (`.data`, a kernel that is given an
    address). So all are copied before the call that takes the snapshot ends, except for those on
    GPUs that only optimizers change: these are lent until the fence, and the others are copied at
    once then. With `lends=False` none is lent, and nothing is copied before `copy_borrowed`.
    """

    def __init__(
        self,
        tree: Tree,
        aliases: Sequence[int | None],
        outline: Outline,
        devices: TorchDevices,
        *,
        lends: bool = True,
    ) -> None:
        self.outline = outline
        self.hold = Hold.BORROWED
        self.pin: Pinning = devices.pin
        self._devices = devices
        self._failure: HoldfastError | None = None
        others = leaves.SavedValues()
        self._pieces: list[tuple[Any, Region]] = []
        held_of: list[tuple[Any, Path]] = []
        for path, leaf, alias in zip(tree.paths, tree.leaves, aliases, strict=True):
            if alias is not None:
                continue
            if isinstance(leaf, torch.Tensor):
                self._pieces.append(tensors.piece_held(leaf))
                held_of.append((leaf, path))
            elif leaves.is_numpy(leaf):
                array = leaves.host_array(leaf)
                self._pieces.append((array, ((0,) * array.ndim, array.shape)))
                held_of.append((leaf, path))
            else:
                others.encode_value(leaf, path)
        self.values, self.process_values = others.values, others.process_values
        self.marks: tuple[Mark, ...] = (None,) * len(self._pieces)
        on_devices = devices_of(held for held, _ in self._pieces)
        self.computed = Computed(on_devices)
        lent: dict[int, tuple[torch.Tensor, Region, Path]] = {}
        if lends and on_devices:
            updated = updated_by_optimizers(tree, devices.loan_fence.covers_tensor)
            for index, ((leaf, path), piece) in enumerate(zip(held_of, self._pieces, strict=True)):
                if id(leaf) in updated and devices.can_lend(piece[0]):
                    lent[index] = *piece, path
        self._loan = Loan(lent)
        self.on_devices = frozenset(lent)
        if lent:
            self._copy_all(but=self._loan)

    @property
    def pieces(self) -> list[Any]:
        """What this process holds of each array of the outline."""
        return [held for held, _ in self._pieces]

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        if self._failure is not None:
            raise self._failure
        self.computed.wait()
        held, outer = self._pieces[chunk.array_index]
        region = chunk.start, chunk.stop
        if isinstance(held, np.ndarray):
            return leaves.bytes_of(held[slices_within(region, outer)])
        if chunk.array_index not in self._loan:
            return tensors.host_bytes(tensors.piece(held, region, outer))
        content = tensors.host_bytes(tensors.piece(held, region, outer))
        self._loan.check_unchanged()
        return content

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        self.computed.wait()
        return self._loan.ranges(chunks)

    def check_unchanged(self) -> None:
        self._loan.check_unchanged()

    def copy_borrowed(self) -> None:
        self._copy_all()
        try:
            self.computed.wait()
            self._loan.check_unchanged()
        except (DeviceError, ProcessLostError) as error:
            self._failure = error
        self._loan = Loan({})
        self.hold = Hold.HOST

    def _copy_all(self, but: Container[int] = ()) -> None:
        self._pieces = [
            (held, region)
            if index in but
            else (
                leaves.owned_copy(held)
                if isinstance(held, np.ndarray)
                else tensors.copyable(held).resolve_conj().resolve_neg().to("cpu", copy=True),
                region,
            )
            for index, (held, region) in enumerate(self._pieces)
        ]

    def at_fence(self, finish: Callable[[], None]) -> bool:
        if not self._loan:
            return False
        self._devices.loan_fence.add_loan(finish)
        return True

    def release(self) -> None:
        self._pieces = []
        self.computed = Computed(())
        self._loan = Loan({})
        self.hold = Hold.HOST


def _is_on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and is_on_device(leaf)


def _tensor_of(array: np.ndarray, spec: ArraySpec) -> torch.Tensor:
    return tensors.tensor_of(array, spec.dtype, path_name(spec.path))
