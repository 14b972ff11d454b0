"""What programs with PyTorch put into a state, besides their own objects. Imports PyTorch."""

from __future__ import annotations

from holdfast.adapt.torch.objects import Replicated
from holdfast.adapt.torch.random_state import RandomState

__all__ = ["RandomState", "Replicated"]
