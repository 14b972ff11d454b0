"""Checkpoint a training run continuously, off the training thread.

This module lists the whole public interface. `CheckpointManager` is imported on first use, so that
the host's agent, which is part of this package, starts without importing a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import errors as errors
from holdfast.policy import preservation_policy as preservation_policy
from holdfast.policy import save_decision_policy as save_decision_policy

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager as CheckpointManager
    from holdfast.manager import RamTier as RamTier

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "RamTier",
    "__version__",
    "errors",
    "preservation_policy",
    "save_decision_policy",
]


def __getattr__(name: str) -> object:
    if name in ("CheckpointManager", "RamTier"):
        from holdfast import manager

        return getattr(manager, name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
