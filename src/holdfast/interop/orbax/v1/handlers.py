"""Save and load checkpointables by their handlers: the names of `orbax.checkpoint.v1.handlers`.

Trees are saved as arrays and values. Every other handler writes into a folder, whose files are
stored in the same commit, as the items of foreign handlers of the first interface are.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import missing_names, outlines
from holdfast.interop.orbax.v1 import registry as registries
from holdfast.interop.orbax.v1 import tree_folders, trees
from holdfast.interop.orbax.v1.path import CreatedPath
from holdfast.interop.orbax.v1.registry import AbstractCheckpointable as AbstractCheckpointable
from holdfast.interop.orbax.v1.registry import Checkpointable as Checkpointable
from holdfast.interop.orbax.v1.registry import CheckpointableHandler as CheckpointableHandler
from holdfast.interop.orbax.v1.registry import (
    CheckpointableHandlerRegistry as CheckpointableHandlerRegistry,
)
from holdfast.interop.orbax.v1.registry import StatefulCheckpointable as StatefulCheckpointable
from holdfast.interop.orbax.v1.registry import global_registry as global_registry
from holdfast.interop.orbax.v1.registry import local_registry as local_registry
from holdfast.interop.orbax.v1.registry import register_handler as register_handler

T = TypeVar("T")

_OF_ORBAX = "orbax.checkpoint.experimental.v1._src.handlers"
_OF_V0 = ("orbax.checkpoint._src.handlers", "orbax.checkpoint.v0._src.handlers")


class PyTreeHandler:
    """Saves a tree of arrays and values.

    As the handler of a checkpointable it marks what is saved as arrays, without a folder. Called by
    a handler of a program, it writes the tree into that one's folder.
    """

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            if value:
                raise InvalidArgumentError(
                    f"PyTreeHandler({name}=...): not supported; convert leaves of other types to "
                    "arrays, or register a handler of your own"
                )

    async def save(self, directory: Any, checkpointable: Any) -> Any:
        """Return what writes a tree to `directory`, for a handler of a program that has one.

        Raises:
            InvalidArgumentError: A leaf cannot be saved.
        """
        return tree_folders.writing(directory, checkpointable)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Return what reads the tree from `directory`."""
        return tree_folders.reading(directory, abstract_checkpointable)

    async def metadata(self, directory: Any) -> Any:
        """Return the abstract form of the tree in `directory`."""
        return tree_folders.described(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether all leaves can be saved."""
        leaves = jax.tree_util.tree_leaves(checkpointable, is_leaf=outlines.is_end)
        return checkpointable is not None and all(map(trees.is_leaf, leaves))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Return whether all leaves are abstract leaves, or such as can be saved."""
        leaves = jax.tree_util.tree_leaves(abstract_checkpointable, is_leaf=outlines.is_end)
        return all(map(trees.is_abstract_leaf, leaves))


class JsonHandler:
    """Saves what JSON can represent, in the file of the first process."""

    def __init__(self, filename: str | None = None) -> None:
        self._names = (filename or "data.json", "data.json", "metadata")

    async def save(self, directory: Any, checkpointable: Any) -> Any:
        """Write the value to `directory`."""
        text = json.dumps(checkpointable)
        return _written(directory, self._names[0], text)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Read the value from `directory`.

        Raises:
            InvalidArgumentError: There is no such file.
        """
        for name in self._names:
            if (directory / name).exists():
                return _value(json.loads((directory / name).read_text()))
        raise InvalidArgumentError(
            f"load {directory.name}: expected one of the files {', '.join(self._names)}, found none"
        )

    async def metadata(self, directory: Any) -> None:
        """Return None: JSON has no abstract form."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether JSON can represent the value."""
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError):
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Return None: what saved it decides."""
        return None


class ProtoHandler:
    """Saves messages of protobuf as text, in the file of the first process."""

    def __init__(self, filename: str = "proto.pbtxt") -> None:
        self._name = filename

    async def save(self, directory: Any, checkpointable: Any) -> Any:
        """Write the message to `directory`."""
        from google.protobuf import text_format  # type: ignore[import-untyped]

        return _written(directory, self._name, text_format.MessageToString(checkpointable))

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Read a message of the class `abstract_checkpointable`.

        Raises:
            InvalidArgumentError: No class is given.
        """
        from google.protobuf import text_format

        if abstract_checkpointable is None:
            raise InvalidArgumentError(
                f"load {directory.name}: expected the class of the message, found None"
            )
        text = (directory / self._name).read_text()
        return _value(text_format.Parse(text, abstract_checkpointable()))

    async def metadata(self, directory: Any) -> Any:
        """Refuse: the class of a message is not stored.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(f"metadata {directory.name}: a message has none")

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether it is a message."""
        return isinstance(checkpointable, _message_class())

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Return whether it is a class of messages."""
        is_class = isinstance(abstract_checkpointable, type)
        return is_class and issubclass(abstract_checkpointable, _message_class())


def _message_class() -> Any:
    try:
        from google.protobuf.message import Message  # type: ignore[import-untyped]
    except ImportError:
        return ()
    return Message


class StatefulCheckpointableHandler:
    """Lets objects that write their own state do so."""

    async def save(self, directory: Any, checkpointable: Any) -> Any:
        """Let the object write its state."""
        return await checkpointable.save(directory)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Let the object set its state; return the object.

        Raises:
            InvalidArgumentError: No object is given.
        """
        if abstract_checkpointable is None:
            raise InvalidArgumentError(
                f"load {directory.name}: To restore a `StatefulCheckpointable`, you must pass an "
                "instance of the object"
            )
        loading = await abstract_checkpointable.load(directory)

        async def loaded() -> Any:
            await loading
            return abstract_checkpointable

        return loaded()

    async def metadata(self, directory: Any) -> Any:
        """Refuse: the object alone knows its state.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            f"metadata {directory.name}: an object with a state of its own has none"
        )

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether it has the methods."""
        return isinstance(checkpointable, StatefulCheckpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Return whether it has the methods."""
        return isinstance(abstract_checkpointable, StatefulCheckpointable)


async def _value(value: T) -> T:
    return value


async def _written(directory: Any, name: str, text: str) -> None:
    path = await directory.await_creation()
    if jax.process_index() == 0:
        (path / name).write_text(text)


def run(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return what a coroutine returns, also where the thread runs an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-orbax-handler") as pool:
        return pool.submit(context.run, asyncio.run, make()).result()


class BackgroundSaveError(HoldfastError):
    """A handler failed after its `save` had returned; `failure` is what it raised.

    Never seen by a program: the call, or the result of an asynchronous one, raises `failure`.
    """

    def __init__(self, failure: Exception) -> None:
        super().__init__(f"save: the handler failed: {failure}")
        self.failure = failure


class FolderHandler:
    """Calls the handler of a checkpointable, as a handler of the first interface."""

    def save(self, directory: Any, args: HandlerSave) -> None:
        """Write the checkpointable, and wait until it is written.

        Raises:
            BackgroundSaveError: What the handler would have done in the background failed.
        """

        async def save() -> None:
            writing = await args.handler.save(CreatedPath(directory), args.item)
            try:
                await writing
            except Exception as error:
                raise BackgroundSaveError(error) from error

        run(save)

    def restore(self, directory: Any, args: HandlerRestore) -> Any:
        """Return the checkpointable, once it was read."""

        async def load() -> Any:
            return await (await args.handler.load(directory, args.item))

        return run(load)

    def metadata(self, directory: Any, handler: Any) -> Any:
        """Return the abstract form of what is in `directory`."""

        async def describe() -> Any:
            return await handler.metadata(directory)

        return run(describe)


@ocp_args.register_with_handler(FolderHandler, for_save=True)
@dataclasses.dataclass
class HandlerSave(ocp_args.CheckpointArgs):
    """Save an object by its handler."""

    item: Any
    handler: Any

    @property
    def recorded_as(self) -> str:
        """The name of the handler's class, which the checkpoint records."""
        return registries.typestr(type(self.handler))


@ocp_args.register_with_handler(FolderHandler, for_restore=True)
@dataclasses.dataclass
class HandlerRestore(ocp_args.CheckpointArgs):
    """Load an object by its handler."""

    item: Any
    handler: Any


def _register(handler: type, module: str, of_v0: tuple[str, ...] = (), name: str = "") -> None:
    others = [f"{_OF_ORBAX}.{module}.{handler.__name__}"]
    others += [f"{place}.{old}" for place in _OF_V0 for old in of_v0]
    register_handler(handler, checkpointable_name=name or None, secondary_typestrs=others)


_register(ProtoHandler, "proto_handler", ("proto_checkpoint_handler.ProtoCheckpointHandler",))
_register(JsonHandler, "json_handler", ("json_checkpoint_handler.JsonCheckpointHandler",))
_register(StatefulCheckpointableHandler, "stateful_checkpointable_handler")
_register(
    PyTreeHandler,
    "pytree_handler",
    (
        "pytree_checkpoint_handler.PyTreeCheckpointHandler",
        "standard_checkpoint_handler.StandardCheckpointHandler",
    ),
)
_register(PyTreeHandler, "pytree_handler", name="state")

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.handlers")
