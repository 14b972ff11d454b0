"""What programs with PyTorch put into a state, besides their own objects. Imports PyTorch."""

from __future__ import annotations

from holdfast.adapt.torch.fences import Fence
from holdfast.adapt.torch.objects import Replicated
from holdfast.adapt.torch.random_state import RandomState
from holdfast.adapt.torch.state import TorchFramework

__all__ = ["Fence", "RandomState", "Replicated", "TorchFramework"]
