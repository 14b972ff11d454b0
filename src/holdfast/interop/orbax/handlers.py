"""Define Orbax's handlers by name: they define only with which arguments an item is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.errors import ArgumentTypeError


class CheckpointHandler:
    """The base class of handlers. Arguments of Orbax's handlers are taken without effect."""

    save_args: type[ocp_args.CheckpointArgs]
    restore_args: type[ocp_args.CheckpointArgs]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class StandardCheckpointHandler(CheckpointHandler):
    """Saves pytrees."""

    save_args, restore_args = ocp_args.StandardSave, ocp_args.StandardRestore


class PyTreeCheckpointHandler(CheckpointHandler):
    """Saves pytrees, with arguments for each leaf."""

    save_args, restore_args = ocp_args.PyTreeSave, ocp_args.PyTreeRestore


class ArrayCheckpointHandler(CheckpointHandler):
    """Saves single arrays."""

    save_args, restore_args = ocp_args.ArraySave, ocp_args.ArrayRestore


class JsonCheckpointHandler(CheckpointHandler):
    """Saves values that JSON can represent."""

    save_args, restore_args = ocp_args.JsonSave, ocp_args.JsonRestore


class JaxRandomKeyCheckpointHandler(CheckpointHandler):
    """Saves keys of `jax.random`."""

    save_args, restore_args = ocp_args.JaxRandomKeySave, ocp_args.JaxRandomKeyRestore


class NumpyRandomKeyCheckpointHandler(CheckpointHandler):
    """Saves the state of `numpy.random`."""

    save_args, restore_args = ocp_args.NumpyRandomKeySave, ocp_args.NumpyRandomKeyRestore


class CompositeCheckpointHandler(CheckpointHandler):
    """Saves several items by name."""

    save_args, restore_args = ocp_args.Composite, ocp_args.Composite


OWN: dict[str, type[CheckpointHandler]] = {
    kind.__name__: kind
    for kind in (
        StandardCheckpointHandler,
        PyTreeCheckpointHandler,
        ArrayCheckpointHandler,
        JsonCheckpointHandler,
        JaxRandomKeyCheckpointHandler,
        NumpyRandomKeyCheckpointHandler,
        CompositeCheckpointHandler,
    )
}


def args_of(handler: Any) -> tuple[type, type]:
    """Return the classes of arguments (to save, to restore) of a handler, ours or Orbax's.

    Raises:
        InvalidArgumentError: The handler is not known.
    """
    handler = getattr(handler, "handler", handler)
    own_handler = _own(handler)
    if own_handler is None:
        raise InvalidArgumentError(
            f"CheckpointManager: expected one of the handlers {', '.join(OWN)}, found "
            f"{type(handler).__module__}.{type(handler).__qualname__}; pass its own arguments to "
            "save and restore instead"
        )
    return own_handler.save_args, own_handler.restore_args


def check_save_args(handler: Any, argument: object, item: str) -> None:
    """Check that a handler that was given for an item takes what the item is saved with.

    Raises:
        ArgumentTypeError: It takes other arguments.
    """
    own_handler = _own(getattr(handler, "handler", handler))
    if own_handler is not None and not isinstance(argument, own_handler.save_args):
        raise ArgumentTypeError(
            f"save {item}: expected args.{own_handler.save_args.__name__}, which the handler of "
            f"this item takes, found args.{type(argument).__name__}"
        )


def _own(handler: Any) -> CheckpointHandler | type[CheckpointHandler] | None:
    return handler if isinstance(handler, CheckpointHandler) else OWN.get(type(handler).__name__)


class CheckpointHandlerRegistry:
    """Which handlers items have, by name; see `CheckpointManager(handler_registry=...)`."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add(self, item: str | None, args: type, handler: Any = None) -> None:
        """Set the handler of the item; one without a name has no effect."""
        if item is not None and handler is not None:
            self.handlers[item] = handler


DefaultCheckpointHandlerRegistry = CheckpointHandlerRegistry

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("handlers")
