"""Define Orbax's handlers by name: they define only with which arguments an item is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.errors import ArgumentTypeError
from holdfast.interop.orbax.records import DEFAULT_ITEM


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
    """Which handlers items have, by name and by the class of their arguments.

    A manager takes the handlers of items with names: `CheckpointManager(handler_registry=...)`.

    Args:
        other_registry: Another one, whose entries are copied.
    """

    def __init__(self, other_registry: Any = None) -> None:
        self._entries: dict[tuple[str | None, type], Any] = {}
        if other_registry is not None:
            self._entries.update(other_registry.get_all_entries())

    @property
    def handlers(self) -> dict[str, Any]:
        """The handlers of the items with names."""
        return {
            item: handler
            for (item, _), handler in self._entries.items()
            if item is not None and handler is not None
        }

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Set the handler of an item, or without a name that of the arguments.

        Raises:
            InvalidArgumentError: A `ValueError`: there is one already.
        """
        key = item, _class_of(args)
        if key in self._entries:
            raise InvalidArgumentError(
                f"registry.add: the item {item!r} has a handler for {key[1].__name__} already"
            )
        self._entries[key] = handler() if isinstance(handler, type) else handler

    def get(self, item: str | None, args: Any) -> Any:
        """Return the handler.

        Raises:
            NoHandlerError: A `KeyError`: there is none.
        """
        key = item, _class_of(args)
        if key not in self._entries:
            raise NoHandlerError(
                f"registry.get: the item {item!r} has no handler for {key[1].__name__}"
            )
        return self._entries[key]

    def has(self, item: str | None, args: Any) -> bool:
        """Return whether there is a handler."""
        return (item, _class_of(args)) in self._entries

    def get_all_entries(self) -> dict[tuple[str | None, type], Any]:
        """Return the handlers by item and class of arguments."""
        return dict(self._entries)


class NoHandlerError(InvalidArgumentError, KeyError):
    """A registry has no handler of an item for a class of arguments."""

    __str__ = Exception.__str__


def _class_of(args: Any) -> type:
    kind: type = args if isinstance(args, type) else type(args)
    return kind


DefaultCheckpointHandlerRegistry = CheckpointHandlerRegistry

EXCLUDING = (
    ("checkpointers", "item_names"),
    ("checkpointers", "item_handlers"),
    ("handler_registry", "item_handlers"),
    ("handler_registry", "item_names"),
)
"""Arguments that say the same in two ways."""


def of_items(
    checkpointers: Any, names: Any, item_handlers: Any, registry: Any
) -> tuple[dict[str, Any], bool | None]:
    """Return the handlers by item, and whether there is one unnamed item; None: not known yet.

    The arguments are those of a manager.

    Raises:
        InvalidArgumentError: Two of them exclude each other.
    """
    given_by = {
        "checkpointers": checkpointers,
        "item_names": names,
        "item_handlers": item_handlers,
        "handler_registry": registry,
    }
    for option, other in EXCLUDING:
        if given_by[option] and given_by[other]:
            raise InvalidArgumentError(
                f"CheckpointManager({option}=..., {other}=...): expected one of the two, found both"
            )
    chosen_handlers = checkpointers if checkpointers is not None else item_handlers
    if isinstance(chosen_handlers, Mapping):
        for handler in chosen_handlers.values():
            args_of(handler)
        return dict(chosen_handlers), False
    if chosen_handlers is not None:
        is_composite = args_of(chosen_handlers)[0] is ocp_args.Composite
        return ({}, False) if is_composite else ({DEFAULT_ITEM: chosen_handlers}, True)
    if registry:
        return dict(registry), None
    return {}, False if names else None


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("handlers")
