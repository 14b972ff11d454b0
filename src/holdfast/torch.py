"""What programs with PyTorch put into a state, besides their own objects. Imports PyTorch.

For the storages of other libraries, beside `holdfast.reading` and `holdfast.building`, the bytes of
tensors: `dtype_name_of`, `host_bytes`, `copy_into`, `tensor_over`, `with_tensors`.
"""

from __future__ import annotations

from holdfast.adapt.torch.devices import Fence
from holdfast.adapt.torch.exact_loader import ExactLoader
from holdfast.adapt.torch.groups import Job
from holdfast.adapt.torch.objects import RandomState, Replicated, with_tensors
from holdfast.adapt.torch.state import TorchFramework
from holdfast.adapt.torch.tensors import copy_into, dtype_name_of, host_bytes, tensor_over
from holdfast.trainer.survival import surviving

__all__ = [
    "ExactLoader",
    "Fence",
    "Job",
    "RandomState",
    "Replicated",
    "TorchFramework",
    "copy_into",
    "dtype_name_of",
    "host_bytes",
    "surviving",
    "tensor_over",
    "with_tensors",
]
