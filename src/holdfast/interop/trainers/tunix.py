"""Tunix: `install()` before a trainer is made, and no file of Tunix is edited.

Tunix's checkpoint manager calls Orbax through the name `ocp` of its module. `install` binds that
name to `holdfast.interop.orbax`, so Tunix's trainers and their options stay as they are.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import holdfast.interop.orbax as drop_in

_NEEDED = (("save", "custom_metadata"), ("maybe_restore", "restore_only_lora_params"))
"""Methods of Tunix's manager, each with one of its arguments."""


def install() -> None:
    """Let Tunix save with Holdfast in this process. Further calls do nothing.

    Raises:
        ImportError: Tunix cannot be imported, or is of a version with another interface.
    """
    try:
        from tunix.sft import checkpoint_manager
    except ImportError as error:
        raise ImportError(
            "holdfast.interop.trainers.tunix: expected Tunix as of google-tunix 0.1.7, found that "
            f"tunix.sft.checkpoint_manager cannot be imported: {error}"
        ) from error
    _check(checkpoint_manager)
    checkpoint_manager.ocp = drop_in


def _check(module: ModuleType) -> None:
    manager = getattr(module, "CheckpointManager", None)
    for name, argument in _NEEDED:
        method = getattr(manager, name, None)
        if method is None or argument not in inspect.signature(method).parameters:
            _refuse(f"CheckpointManager.{name}(... {argument} ...)")
    if not hasattr(getattr(module, "ocp", None), "CheckpointManager"):
        _refuse("ocp, the name of orbax.checkpoint there")


def _refuse(lacks: str) -> None:
    raise ImportError(
        "holdfast.interop.trainers.tunix: expected Tunix as of google-tunix 0.1.7, found one "
        f"without tunix.sft.checkpoint_manager.{lacks}; use such a version"
    )
