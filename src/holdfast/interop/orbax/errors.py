"""Define the errors that programs written for Orbax expect, as kinds of Holdfast's errors."""

from __future__ import annotations

from holdfast.errors import InvalidArgumentError, StepExistsError, StepNotFoundError


class StepAlreadyExistsError(StepExistsError, ValueError):
    """The step is already saved: save a later one, or delete it first."""


class TrainingStepExistsError(StepAlreadyExistsError, FileExistsError):
    """The step is already saved, as Orbax's second interface reports it."""

    __str__ = Exception.__str__


class CheckpointNotFoundError(StepNotFoundError, FileNotFoundError):
    """There is no checkpoint of this step, or none at this path."""

    __str__ = Exception.__str__


class ItemNotFoundError(InvalidArgumentError, FileNotFoundError, KeyError):
    """The checkpoint has no item of this name."""

    __str__ = Exception.__str__


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """A call was given an argument of a type that it does not take."""
