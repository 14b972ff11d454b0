"""The names of `orbax.checkpoint.v1.training.errors`."""

from typing import TYPE_CHECKING

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.errors import CheckpointNotFoundError as StepNotFoundError
from holdfast.interop.orbax.errors import TrainingStepExistsError as StepAlreadyExistsError

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.training.errors")

__all__ = ["StepAlreadyExistsError", "StepNotFoundError"]
