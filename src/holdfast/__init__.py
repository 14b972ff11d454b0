"""Checkpoint a training run continuously, off the training thread.

This module lists the whole public interface. Each name is imported on first use, so that the host's
agent, which is part of this package, starts quickly. No framework is imported that the program does
not import. `holdfast.data` orders the samples of a training, `holdfast.torch` is for programs that
use PyTorch, `holdfast.reading` and `holdfast.building` are for integrations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import building as building
    from holdfast import data as data
    from holdfast import errors as errors
    from holdfast import reading as reading
    from holdfast import torch as torch
    from holdfast.engine.reading.metadata import ArrayMetadata as ArrayMetadata
    from holdfast.engine.reading.metadata import CheckpointMetadata as CheckpointMetadata
    from holdfast.engine.reading.metadata import ReusedMetadata as ReusedMetadata
    from holdfast.peers.tls import PeerTls as PeerTls
    from holdfast.policy import preservation_policy as preservation_policy
    from holdfast.policy import save_decision_policy as save_decision_policy
    from holdfast.policy.contexts import CheckpointInfo as CheckpointInfo
    from holdfast.policy.loss_guard import LossGuard as LossGuard
    from holdfast.trainer.checkpoint_manager import CheckpointManager as CheckpointManager
    from holdfast.trainer.one_shot import load as load
    from holdfast.trainer.one_shot import save as save
    from holdfast.trainer.options import HostNetwork as HostNetwork
    from holdfast.trainer.options import ProcessHooks as ProcessHooks
    from holdfast.trainer.options import RamTier as RamTier
    from holdfast.trainer.options import RemoteTier as RemoteTier
    from holdfast.trainer.options import ReplicaCheck as ReplicaCheck
    from holdfast.trainer.restore.restoring import RestoreReport as RestoreReport
    from holdfast.trainer.run import Run as Run
    from holdfast.trainer.run import open_run as open_run

__version__ = "0.1.0"

__all__ = [
    "ArrayMetadata",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointMetadata",
    "HostNetwork",
    "LossGuard",
    "PeerTls",
    "ProcessHooks",
    "RamTier",
    "RemoteTier",
    "ReplicaCheck",
    "RestoreReport",
    "ReusedMetadata",
    "Run",
    "__version__",
    "errors",
    "load",
    "open_run",
    "preservation_policy",
    "save",
    "save_decision_policy",
]

_PLACES = {
    "ArrayMetadata": "engine.reading.metadata",
    "CheckpointInfo": "policy.contexts",
    "CheckpointManager": "trainer.checkpoint_manager",
    "CheckpointMetadata": "engine.reading.metadata",
    "HostNetwork": "trainer.options",
    "LossGuard": "policy.loss_guard",
    "PeerTls": "peers.tls",
    "ProcessHooks": "trainer.options",
    "RamTier": "trainer.options",
    "RemoteTier": "trainer.options",
    "ReplicaCheck": "trainer.options",
    "RestoreReport": "trainer.restore.restoring",
    "ReusedMetadata": "engine.reading.metadata",
    "Run": "trainer.run",
    "load": "trainer.one_shot",
    "open_run": "trainer.run",
    "save": "trainer.one_shot",
}
"""The module that defines each name."""

_MODULES = {
    "building": "building",
    "data": "data",
    "errors": "errors",
    "preservation_policy": "policy.preservation_policy",
    "reading": "reading",
    "save_decision_policy": "policy.save_decision_policy",
    "torch": "torch",
}
"""The modules for users. `__all__` lacks those that only some programs need."""


def __getattr__(name: str) -> object:
    import importlib

    if name in _MODULES:
        value: object = importlib.import_module(f"holdfast.{_MODULES[name]}")
    elif name in _PLACES:
        value = getattr(importlib.import_module(f"holdfast.{_PLACES[name]}"), name)
    else:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    # The next access finds the name in the module and does not come here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
