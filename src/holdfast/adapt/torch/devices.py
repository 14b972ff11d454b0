"""PyTorch tensors on GPUs: lent to a save until a fence, and copied by streams of Holdfast's own.

Lent are the parameters and states of optimizers: nothing but a step changes them. All else is
copied before `save` returns, since forward passes change buffers, and nothing reports when.

The streams wait for no other stream. So the thread that queues the copies first waits until the
state is computed (`holdfast.adapt.torch.computed`). A tensor's memory is not used for another one
meanwhile, because the save holds the tensor.

A fence is a place at which a training may change what a save still copies. A save returns while
weights and optimizer states are being copied; forward and backward run beside the copy. The
training stops at the fence until the copy has ended, if it has not by then. See
docs/decisions/0032.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.adapt.contract import DeviceRange
from holdfast.adapt.devices.cuda import open_cuda
from holdfast.adapt.devices.runtime import DeviceRuntime
from holdfast.adapt.devices.transfers import RegisteredMemory, Streams
from holdfast.adapt.torch import tensors
from holdfast.errors import DeviceError
from holdfast.format.grid import Region, contiguous_start, region_shape
from holdfast.format.layout import Chunk
from holdfast.format.paths import Path, path_name


class Fence:
    """A fence that the training passes by calling it.

    For trainings whose updates PyTorch does not report: replayed CUDA graphs, compiled optimizer
    steps, kernels of one's own, `.data`. Give it to the manager by
    `framework=TorchFramework(fence=...)`, and call it each time before weights or optimizer states
    are changed. It belongs to the training thread.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def __call__(self) -> None:
        """Wait until all copies of earlier saves have ended, however they ended."""
        while self._waiting:
            self._waiting.pop()()

    def add_loan(self, finish: Callable[[], None]) -> None:
        """Call `finish` when the fence is passed next."""
        self._waiting.append(finish)

    def covers_tensor(self, optimizer: Any) -> bool:
        """Return whether the training passes the fence before `optimizer` changes anything."""
        return True


class OptimizerFence(Fence):
    """The fence that each step of each optimizer passes, by PyTorch's global hook."""

    def __init__(self) -> None:
        super().__init__()
        # A compiled step would otherwise contain the wait, or the lack of one.
        hook = torch.compiler.disable(self._before_step)
        self._handle = register_optimizer_step_pre_hook(hook)

    def covers_tensor(self, optimizer: Any) -> bool:
        # Steps that are captured in CUDA graphs call no hook; these may be.
        is_hooked = getattr(type(optimizer).step, "hooked", False)
        return is_hooked and not any(of.get("capturable") for of in optimizer.param_groups)

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        self()


log = logging.getLogger(__name__)

_OTHER: dict[str, Callable[[], DeviceRuntime]] = {}


@contextmanager
def serving(kind: str, open_runtime: Callable[[], DeviceRuntime]) -> Iterator[None]:
    """Take tensors on devices of `kind` for those of a GPU within the context."""
    _OTHER[kind] = open_runtime
    try:
        yield
    finally:
        del _OTHER[kind]


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether the elements that this process holds are in a GPU's memory."""
    held = tensor if tensors.is_plain(tensor) else tensors.local(tensor)
    kind = held.device.type
    return kind == "cuda" or kind in _OTHER


def devices_of(pieces: Iterable[Any]) -> set[torch.device]:
    """Return the devices of a GPU in whose memory any of these tensors and arrays is."""
    # Asked of each tensor of a state at each save.
    if _OTHER:
        pieces = [of for of in pieces if isinstance(of, torch.Tensor) and is_on_device(of)]
        return {of.device for of in pieces}
    return {of.device for of in pieces if isinstance(of, torch.Tensor) and of.is_cuda}


class TorchDevices:
    """The state of one process about the devices that hold its states.

    Args:
        fence: what the training passes before it changes lent tensors; None: the steps of its
            optimizers.
    """

    def __init__(self, fence: Fence | None) -> None:
        self._fence = fence
        self._lock = threading.Lock()
        self._streams: Streams | None = None
        self._has_fallen_back = False

    @property
    def loan_fence(self) -> Fence:
        """The fence."""
        if self._fence is None:
            self._fence = OptimizerFence()
        return self._fence

    def can_lend(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes of a local tensor are in a device's memory as in an image."""
        return (
            is_on_device(tensor)
            and tensor.numel() > 0
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not tensor.is_inference()
            and self._streams_of(tensor.device) is not None
        )

    def expect(self, on_devices: Iterable[torch.Tensor]) -> None:
        """Let `pin` register memory for the device of the first of these tensors."""
        for tensor in on_devices:
            self._streams_of(tensors.local(tensor).device)
            return

    def pin(self, memory: memoryview) -> RegisteredMemory | None:
        """Register memory; see `holdfast.adapt.contract.Snapshot.pin`."""
        if not memory or self._streams is None or not self._is_in_use():
            return None
        try:
            return RegisteredMemory(self._streams, memory, 0)
        except DeviceError as error:
            self._fall_back(error)
            return None

    def _is_in_use(self) -> bool:
        if not self._has_fallen_back and self._streams is not None and self._streams.failure:
            self._fall_back(self._streams.failure)
        return not self._has_fallen_back

    def _streams_of(self, device: torch.device) -> Streams | None:
        with self._lock:
            if self._streams is None and not self._has_fallen_back:
                try:
                    self._streams = Streams(_OTHER.get(device.type, open_cuda)())
                except DeviceError as error:
                    self._fall_back(error)
        return self._streams if self._is_in_use() else None

    def _fall_back(self, reason: DeviceError) -> None:
        """Copy states by PyTorch, before `save` returns, from now on."""
        if not self._has_fallen_back:
            self._has_fallen_back = True
            log.warning(
                "states are copied from their devices before `save` returns, at the rate of memory "
                "that is not page-locked: %s",
                reason,
            )


class Loan:
    """The tensors of one state that are lent until the fence, by their index in the outline."""

    def __init__(self, lent: Mapping[int, tuple[torch.Tensor, Region, Path]]) -> None:
        self._tensors = dict(lent)
        self._versions = {index: of[0]._version for index, of in lent.items()}

    def __contains__(self, index: object) -> bool:
        return index in self._tensors

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        """Return the device ranges of those `chunks` that are contiguous in lent tensors."""
        ranges = {}
        for chunk in chunks:
            lent = self._tensors.get(chunk.array_index)
            region = chunk.start, chunk.stop
            before = None if lent is None else contiguous_start(region, lent[1])
            if lent is None or before is None or not chunk.size_bytes:
                continue
            tensor = lent[0]
            ranges[chunk] = DeviceRange(
                device=tensor.device.index or 0,
                address=tensor.data_ptr() + before * tensor.element_size(),
                size_bytes=math.prod(region_shape(region)) * tensor.element_size(),
                offset_bytes=chunk.offset_bytes,
            )
        return ranges

    def check_unchanged(self) -> None:
        """Check that no lent tensor was changed in a way that PyTorch counts.

        Raises:
            DeviceError: one was; the message has its path.
        """
        for index, (tensor, _, path) in self._tensors.items():
            if tensor._version != self._versions[index]:
                raise DeviceError(
                    f"copy {path_name(path)} from its device: it was changed before the copy had "
                    "ended, and not by the step of an optimizer; call a fence before such changes "
                    "(see holdfast.torch.Fence)"
                )
