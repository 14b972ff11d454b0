"""Define the errors of Orbax's second interface, as kinds of Holdfast's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.errors import CheckpointNotFoundError


class InvalidLayoutError(CheckpointNotFoundError, ValueError):
    """There is no checkpoint of the layout wanted at a path, or none with such a tree."""

    __str__ = Exception.__str__


class UnsupportedLayoutError(InvalidArgumentError, NotImplementedError):
    """The layout of the context is only loaded."""


class DeletionInProgressError(HoldfastError, RuntimeError):
    """Never raised: what is being deleted here is not there."""


class DeletionRecoveryError(HoldfastError, RuntimeError):
    """Never raised: a deletion that was interrupted here has happened, or not."""


class FrozenContextError(InvalidArgumentError, RuntimeError):
    """A context, or one of its options, was changed inside of its `with` block."""


class FileExistsAtPathError(InvalidArgumentError, FileExistsError):
    """There is a finished checkpoint at the path to save to."""

    __str__ = Exception.__str__


class AlreadyExistsError(InvalidArgumentError):
    """A registry has a handler of this name, or this handler, already."""


class NoEntryError(InvalidArgumentError, KeyError):
    """A registry has no handler that takes a checkpointable."""

    __str__ = Exception.__str__


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.errors")
