"""Holdfast keeps a training run from losing work: continuous checkpoints, off the training thread.

The whole public interface is on this page. Each name is loaded on first use. The host's agent,
which is a part of this package too, therefore starts without any framework, and a program that
imports Holdfast pays for what it uses alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import errors as errors
    from holdfast.manager import CheckpointManager as CheckpointManager
    from holdfast.manager import RamTier as RamTier
    from holdfast.policy import preservation_policy as preservation_policy
    from holdfast.policy import save_decision_policy as save_decision_policy

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
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    import importlib

    if name == "errors":
        found: object = importlib.import_module("holdfast.errors")
    elif name.endswith("_policy"):
        found = importlib.import_module(f"holdfast.policy.{name}")
    else:
        found = getattr(importlib.import_module("holdfast.manager"), name)
    # The next access finds the name in the module and does not come here.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
