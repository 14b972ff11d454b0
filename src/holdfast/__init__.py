"""Checkpoint a training run continuously, off the training thread.

This module lists the whole public interface. Each name is imported on first use, so that the host's
agent, which is part of this package, starts quickly. No framework is imported that the program does
not import; `holdfast.torch` is for programs that use PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import errors as errors
    from holdfast import torch as torch
    from holdfast.peers.tls import PeerTls as PeerTls
    from holdfast.policy import preservation_policy as preservation_policy
    from holdfast.policy import save_decision_policy as save_decision_policy
    from holdfast.trainer.checkpoint_manager import CheckpointManager as CheckpointManager
    from holdfast.trainer.one_shot import load as load
    from holdfast.trainer.one_shot import save as save
    from holdfast.trainer.options import HostNetwork as HostNetwork
    from holdfast.trainer.options import RamTier as RamTier
    from holdfast.trainer.options import RemoteTier as RemoteTier
    from holdfast.trainer.run import Run as Run
    from holdfast.trainer.run import open_run as open_run

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "HostNetwork",
    "PeerTls",
    "RamTier",
    "RemoteTier",
    "Run",
    "__version__",
    "errors",
    "load",
    "open_run",
    "preservation_policy",
    "save",
    "save_decision_policy",
]

_MODULES = {
    "CheckpointManager": "trainer.checkpoint_manager",
    "HostNetwork": "trainer.options",
    "PeerTls": "peers.tls",
    "RamTier": "trainer.options",
    "RemoteTier": "trainer.options",
    "Run": "trainer.run",
    "load": "trainer.one_shot",
    "open_run": "trainer.run",
    "save": "trainer.one_shot",
}
"""The module that defines each name."""


def __getattr__(name: str) -> object:
    import importlib

    if name == "torch":
        return importlib.import_module("holdfast.torch")
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if name == "errors":
        value: object = importlib.import_module("holdfast.errors")
    elif name.endswith("_policy"):
        value = importlib.import_module(f"holdfast.policy.{name}")
    else:
        value = getattr(importlib.import_module(f"holdfast.{_MODULES[name]}"), name)
    # The next access finds the name in the module and does not come here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
