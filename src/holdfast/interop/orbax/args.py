"""Define the arguments that say how an item is saved and restored: `ocp.args`.

The classes have the names, fields and defaults of Orbax's. `checked` also takes Orbax's own
objects, and those of handlers that are registered with Orbax or here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.errors import ArgumentTypeError


class CheckpointArgs:
    """The base class of all arguments."""


@dataclasses.dataclass
class StandardSave(CheckpointArgs):
    """Save a pytree of arrays and Python values."""

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclasses.dataclass
class StandardRestore(CheckpointArgs):
    """Restore a pytree like `item`; without it, as it was saved.

    With `strict=False` arrays are cut or padded with zeros to the shapes of `item`.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


@dataclasses.dataclass
class PyTreeSave(CheckpointArgs):
    """Save a pytree; `save_args` may give dtypes to convert to."""

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclasses.dataclass
class PyTreeRestore(CheckpointArgs):
    """Restore a pytree with the structure of `item`, as `restore_args` says for each leaf."""

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclasses.dataclass
class ArraySave(CheckpointArgs):
    """Save one array or number."""

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class ArrayRestore(CheckpointArgs):
    """Restore one array or number."""

    item: Any = None
    restore_args: Any = None


@dataclasses.dataclass
class JsonSave(CheckpointArgs):
    """Save a value that JSON can represent."""

    item: Any


@dataclasses.dataclass
class JsonRestore(CheckpointArgs):
    """Restore a value that JSON can represent."""

    item: Any = None


@dataclasses.dataclass
class JaxRandomKeySave(CheckpointArgs):
    """Save a key of `jax.random`."""

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class JaxRandomKeyRestore(CheckpointArgs):
    """Restore a key of `jax.random`."""

    restore_args: Any = None


@dataclasses.dataclass
class NumpyRandomKeySave(CheckpointArgs):
    """Save the state of `numpy.random`."""

    item: Any


@dataclasses.dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    """Restore the state of `numpy.random`."""


class Composite(CheckpointArgs):
    """Name several items: arguments by name, and in results the restored items by name."""

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise ArgumentTypeError(
                    f"Composite({name}=...): expected a name that does not begin with two "
                    f"underscores, found {name!r}"
                )
        self.__dict__["_items"] = dict(items)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_items"][name]
        except KeyError:
            raise AttributeError(
                f"Composite: no item {name!r}; it has {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise ArgumentTypeError(f"Composite.{name}: it cannot be changed; create another one")

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composite) and self._items == other._items

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"

    def get(self, name: str, default: Any = None) -> Any:
        """Return the item `name`, or `default`."""
        return self._items.get(name, default)

    def keys(self) -> Any:
        """Return the names."""
        return self._items.keys()

    def values(self) -> Any:
        """Return the items."""
        return self._items.values()

    def items(self) -> Any:
        """Return the names with their items."""
        return self._items.items()


TREES = (StandardSave, PyTreeSave)
OWN: dict[str, type[CheckpointArgs]] = {
    kind.__name__: kind
    for kind in (
        StandardSave,
        StandardRestore,
        PyTreeSave,
        PyTreeRestore,
        ArraySave,
        ArrayRestore,
        JsonSave,
        JsonRestore,
        JaxRandomKeySave,
        JaxRandomKeyRestore,
        NumpyRandomKeySave,
        NumpyRandomKeyRestore,
    )
}

_handlers: dict[type, type] = {}
"""The handlers that `register_with_handler` has registered, by the class of their arguments."""


def register_with_handler(
    handler_cls: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[type], type]:
    """Return a decorator that registers a class of arguments with the handler that takes it."""

    def registered(kind: type) -> type:
        _handlers[kind] = handler_cls
        kind.is_for_save, kind.is_for_restore = for_save, for_restore  # type: ignore[attr-defined]
        return kind

    return registered


def handler_of(given: object) -> type | None:
    """Return the foreign handler that takes the arguments `given`; None if there is none."""
    kind = type(given)
    if kind in _handlers:
        return _handlers[kind]
    orbax: Any = sys.modules.get("orbax.checkpoint.checkpoint_args")
    if orbax is None or not issubclass(kind, orbax.CheckpointArgs):
        return None
    try:
        handler: type = orbax.get_registered_handler_cls(kind)
    except ValueError:
        return None
    return handler


def checked(given: object, call: str) -> CheckpointArgs:
    """Return the arguments `given` as a class of this module, or as foreign ones with a handler.

    Raises:
        ArgumentTypeError: They are no arguments, or nothing is registered to take them.
    """
    if isinstance(given, Composite) or type(given) in OWN.values():
        return given  # type: ignore[return-value]
    kind = type(given)
    if kind.__module__.startswith("orbax.checkpoint"):
        if kind.__name__ == "CompositeArgs":
            return Composite(**dict(given.items()))  # type: ignore[attr-defined]
        own = OWN.get(kind.__name__.removesuffix("Args"))
        if own is None and kind.__name__ == "ArrayRestoreArgs":
            own = ArrayRestore
        if own is not None:
            names = {field.name for field in dataclasses.fields(own)}  # type: ignore[arg-type]
            values = vars(given).items()
            return own(**{name: value for name, value in values if name in names})
    if handler_of(given) is not None:
        return given  # type: ignore[return-value]
    raise ArgumentTypeError(
        f"{call}: expected arguments such as args.StandardSave(state), or a class with a "
        f"registered handler, found {kind.__module__}.{kind.__qualname__}"
    )


def as_composite(given: Mapping[str, Any]) -> Composite:
    """Return items by name as a `Composite`."""
    return Composite(**given)


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("args")
