"""The names of `orbax.checkpoint.v1.training`."""

from typing import TYPE_CHECKING

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.checkpoint_managers import (
    preservation_policy as preservation_policies,
)
from holdfast.interop.orbax.checkpoint_managers import (
    save_decision_policy as save_decision_policies,
)
from holdfast.interop.orbax.v1.checkpointer import Checkpointer, CheckpointMetadata, RootMetadata
from holdfast.interop.orbax.v1.training import errors as errors

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.training")

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "preservation_policies",
    "save_decision_policies",
]
