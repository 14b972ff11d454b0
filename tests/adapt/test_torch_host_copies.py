"""The copies of a restore into ordinary tensors on the host."""

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapt.torch import host_copies
from holdfast.adapt.torch.host_copies import HostCopies


def _filled(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Fill tensors with other elements, all at once; return the expected ones."""
    copies, buffers = HostCopies(), []
    for seed, tensor in enumerate(tensors):
        rng = np.random.default_rng(seed)
        buffers.append(rng.standard_normal(tuple(tensor.shape)).astype(np.float32))
        assert copies.queue(tensor, {((0,) * tensor.dim(), tuple(tensor.shape)): buffers[-1]})
    copies.run()
    return buffers


def test_all_bytes_of_small_and_large_tensors_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "PIECE_SIZE_BYTES", 4096)
    shapes = [(1000, 77), (3,), (), (0, 5), (1024,), (513, 2, 3)]
    tensors = [torch.zeros(shape) for shape in shapes]
    for tensor, expected in zip(tensors, _filled(*tensors), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), expected)


def test_autograd_finds_that_a_tensor_it_needs_was_filled() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    loss = (weight * weight).sum()
    _filled(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_clone_that_shares_memory_until_one_is_written_keeps_its_elements() -> None:
    original = torch.ones(16)
    clone = torch._lazy_clone(original)
    (expected,) = _filled(original)
    assert clone.tolist() == [1.0] * 16
    np.testing.assert_array_equal(original.numpy(), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(1).expand(6),
        torch.zeros(6, dtype=torch.complex64).conj(),
        torch.zeros(6, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "expanded", "conjugated", "meta", "sparse"],
)
def test_a_tensor_that_is_no_contiguous_host_memory_is_refused(tensor: Any) -> None:
    shape = tuple(tensor.shape)
    buffer = np.zeros(shape, np.complex64 if tensor.is_complex() else np.float32)
    assert not HostCopies().queue(tensor, {((0,) * len(shape), shape): buffer})
