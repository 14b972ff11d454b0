"""The copies of a restore into tensors on GPUs, with fakes of PyTorch's streams and events.

`tests/gpu` has them on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapt.torch import device_copies
from holdfast.adapt.torch.device_copies import DeviceCopies
from holdfast.errors import DeviceError


class FakeStream:
    """A stream on which each copy is made when it is queued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class FakeEvent:
    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def device_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the host's tensors for those of a GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(
        device_copies, "_locked_memory", lambda size: torch.empty(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(device_copies, "_is_on_gpu", lambda held: True)


def filled(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Fill tensors with other elements, all at once; return the expected ones."""
    copies, buffers = DeviceCopies(), []
    for seed, tensor in enumerate(tensors):
        rng = np.random.default_rng(seed)
        buffers.append(rng.standard_normal(tuple(tensor.shape)).astype(np.float32))
        assert copies.queue(tensor, {((0,) * tensor.dim(), tuple(tensor.shape)): buffers[-1]})
    copies.run()
    return buffers


def test_all_bytes_of_small_and_large_tensors_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "PIECE_SIZE_BYTES", 4096)
    shapes = [(1000, 77), (3,), (), (1024,), (1, 1), (513, 2, 3), (4096,)]
    tensors = [torch.zeros(shape) for shape in shapes]
    for tensor, expected in zip(tensors, filled(*tensors), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), expected)


def test_autograd_finds_that_a_tensor_it_needs_was_filled() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    loss = (weight * weight).sum()
    filled(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(1).expand(6),
        torch.zeros(6, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
    ],
    ids=["transposed", "expanded", "conjugated", "empty"],
)
def test_what_is_more_than_a_copy_of_bytes_is_refused(tensor: Any) -> None:
    shape = tuple(tensor.shape)
    dtype = np.complex64 if tensor.is_complex() else np.float32
    region = (0,) * len(shape), shape
    assert not DeviceCopies().queue(tensor, {region: np.ones(shape, dtype)})


def test_a_device_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size_bytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device_copies, "_locked_memory", fail)
    with pytest.raises(DeviceError, match="copy what was restored to cpu: CUDA error"):
        filled(torch.zeros(3))
