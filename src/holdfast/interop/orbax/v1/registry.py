"""Find the handler of a checkpointable: the protocols of handlers, registries, and their rules.

A registry lists classes of handlers, each for any checkpointable, or for one name. Of several that
take an object, the one that was added last is used.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from holdfast.interop.orbax.v1.errors import AlreadyExistsError, NoEntryError
from holdfast.interop.orbax.v1.path import Path, PathAwaitingCreation

T_contra = TypeVar("T_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)

Checkpointable = Any
AbstractCheckpointable = Any
RegistryEntry = tuple[type, str | None]


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that writes its own state to a folder, and sets it from there.

    Both methods are awaited, and then what they return. Iterators of Grain are such objects.
    """

    async def save(self, directory: PathAwaitingCreation) -> Awaitable[None]:
        """Write the state of this process."""
        ...

    async def load(self, directory: Path) -> Awaitable[None]:
        """Set the state of this process."""
        ...


class CheckpointableHandler(Protocol[T_contra, A_co]):
    """What saves and loads objects of a kind, in a folder of their own.

    `save` and `load` are awaited, and then what they return. The files are part of the checkpoint:
    they are stored with its arrays in one commit.
    """

    async def save(self, directory: PathAwaitingCreation, checkpointable: T_contra) -> Any:
        """Write the object to `directory`, once that was created."""
        ...

    async def load(self, directory: Path, abstract_checkpointable: Any = None) -> Any:
        """Read an object, like `abstract_checkpointable`."""
        ...

    async def metadata(self, directory: Path) -> A_co:
        """Return the abstract form of what is in `directory`."""
        ...

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether this handler saves the object."""
        ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Return whether it loads objects of this abstract form; None: the stored name decides."""
        ...


class CheckpointableHandlerRegistry(Protocol):
    """The interface of registries."""

    def add(
        self,
        handler_type: type,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        """Add a handler."""
        ...

    def get(self, checkpointable_name: str) -> type:
        """Return the handler of a name."""
        ...

    def has(self, checkpointable_name: str) -> bool:
        """Return whether a name has a handler."""
        ...

    def get_all_entries(self) -> Sequence[RegistryEntry]:
        """Return the handlers with their names, in the order in which they were added."""
        ...

    def get_secondary_typestrs(self, handler_type: type) -> Sequence[str]:
        """Return other names under which the handler's class was recorded."""
        ...


class _Registry:
    """A registry in memory."""

    def __init__(self, *others: Any) -> None:
        self._entries: list[RegistryEntry] = []
        self._other_names: dict[type, tuple[str, ...]] = {}
        for other in others:
            for handler, name in other.get_all_entries():
                names = _other_names(other, handler)
                self.add(handler, checkpointable_name=name, secondary_typestrs=names)

    def __repr__(self) -> str:
        entries = (f"{kind.__name__} for {name or 'any'}" for kind, name in self._entries)
        return f"<registry of {', '.join(entries)}>"

    def add(
        self,
        handler_type: type,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> _Registry:
        """Add a class of handlers, for one name or for all.

        Args:
            handler_type: The class, which is made without arguments.
            checkpointable_name: The name; None: any.
            secondary_typestrs: Other names of the class, as checkpoints may have them.

        Raises:
            AlreadyExistsError: The name has a handler, or this one is there already.
            ArgumentTypeError: It is no class.
        """
        if not isinstance(handler_type, type):
            raise AlreadyExistsError(
                f"registry.add: expected a class of handlers, found {handler_type!r}; pass its "
                "class, which is made without arguments"
            )
        if checkpointable_name and self.has(checkpointable_name):
            raise AlreadyExistsError(
                f"registry.add: {checkpointable_name!r} has a handler already; use another name, "
                "or another registry"
            )
        if not checkpointable_name and handler_type in (kind for kind, _ in self._entries):
            raise AlreadyExistsError(f"registry.add: {handler_type.__name__} is there already")
        self._entries.append((handler_type, checkpointable_name))
        if secondary_typestrs is not None:
            self._other_names[handler_type] = tuple(secondary_typestrs)
        return self

    def get(self, checkpointable_name: str) -> type:
        """Return the handler of a name.

        Raises:
            NoEntryError: It has none.
        """
        for kind, name in self._entries:
            if name == checkpointable_name:
                return kind
        raise NoEntryError(f"registry.get: {checkpointable_name!r} has no handler")

    def has(self, checkpointable_name: str) -> bool:
        """Return whether a name has a handler."""
        return any(name == checkpointable_name for _, name in self._entries)

    def get_all_entries(self) -> Sequence[RegistryEntry]:
        """Return the handlers with their names, in the order in which they were added."""
        return tuple(self._entries)

    def get_secondary_typestrs(self, handler_type: type) -> Sequence[str]:
        """Return other names under which the handler's class was recorded."""
        return self._other_names.get(handler_type, ())


class ReadOnlyRegistry(_Registry):
    """A copy of a registry to which nothing is added."""

    def __init__(self, registry: Any) -> None:
        self._is_open = True
        super().__init__(registry)
        self._is_open = False

    def add(self, *args: Any, **named: Any) -> _Registry:
        """Refuse: set another registry, such as `handlers.local_registry()`.

        Raises:
            ReadOnlyRegistryError: Always, once it was made.
        """
        if self._is_open:
            return super().add(*args, **named)
        raise ReadOnlyRegistryError(
            "registry.add: the default registry of a Context cannot be changed; set "
            "context.checkpointables.registry = handlers.local_registry().add(...)"
        )


class ReadOnlyRegistryError(AlreadyExistsError, NotImplementedError):
    """A handler was added to a registry that cannot be changed."""


_global = _Registry()


def global_registry() -> _Registry:
    """Return the registry of the process, which every local one includes unless told otherwise."""
    return _global


def local_registry(
    other_registry: Any = None, *, include_global_registry: bool = True
) -> _Registry:
    """Return a new registry: of the process, of another one, of both, or empty."""
    others = [_global] if include_global_registry else []
    return _Registry(*others, *([] if other_registry is None else [other_registry]))


def register_handler(
    cls: Any,
    *,
    checkpointable_name: str | None = None,
    secondary_typestrs: Sequence[str] | None = None,
) -> Any:
    """Add a class of handlers to the registry of the process, as `add` does, and return it."""
    _global.add(cls, checkpointable_name=checkpointable_name, secondary_typestrs=secondary_typestrs)
    return cls


def typestr(handler: type) -> str:
    """Return the name of a handler's class that checkpoints record."""
    return f"{handler.__module__}.{handler.__qualname__}"


def handler_to_save(registry: Any, checkpointable: Any, name: str) -> Any:
    """Return the handler that saves an object.

    Objects with a state of their own prefer handlers that say they take them over that of the name.

    Raises:
        NoEntryError: A `KeyError`: there is none.
    """
    able = _last(registry, lambda handler: handler.is_handleable(checkpointable))
    if able is not None and isinstance(checkpointable, StatefulCheckpointable):
        return able
    if registry.has(name):
        return registry.get(name)()
    if able is not None:
        return able
    raise NoEntryError(
        f"save {name}: no handler takes {typestr(type(checkpointable))}; register one with "
        "handlers.register_handler, or give the object async methods save and load. Registered "
        f"are {_shown(registry)}"
    )


def handler_to_load(registry: Any, abstract: Any, name: str, saved_by: str | None) -> Any:
    """Return the handler that loads a checkpointable.

    Args:
        registry: The handlers.
        abstract: Its abstract form; None loads it as it was saved.
        name: Its name.
        saved_by: The name of the class that saved it, if that is recorded.

    Raises:
        NoEntryError: A `KeyError`: there is none.
    """
    own = registry.get(name)() if registry.has(name) else None
    recorded = _recorded(registry, saved_by)
    is_any = abstract is None

    def takes(handler: Any) -> bool:
        return handler is not None and (is_any or bool(handler.is_abstract_handleable(abstract)))

    if isinstance(abstract, StatefulCheckpointable) and takes(recorded):
        return recorded
    for handler in (own, recorded):
        if takes(handler):
            return handler
    able = None if is_any else _last(registry, takes)
    if able is not None or own is not None:
        return able or own
    raise NoEntryError(
        f"load {name}: no handler is registered that loads it: it was saved by "
        f"{saved_by or 'an unknown handler'}; register that. Registered are {_shown(registry)}"
    )


def _recorded(registry: Any, saved_by: str | None) -> Any:
    for kind, _ in reversed(registry.get_all_entries()):
        if saved_by is not None and saved_by in (typestr(kind), *_other_names(registry, kind)):
            return kind()
    return None


def _last(registry: Any, takes: Any) -> Any:
    for kind, name in reversed(registry.get_all_entries()):
        handler = kind() if name is None else None
        if handler is not None and takes(handler):
            return handler
    return None


def _other_names(registry: Any, kind: type) -> Sequence[str]:
    names: Sequence[str] = getattr(registry, "get_secondary_typestrs", lambda _: ())(kind)
    return names


def _shown(registry: Any) -> str:
    return ", ".join(kind.__name__ for kind, _ in registry.get_all_entries())
