"""Save one checkpoint to one path, without a manager: `StandardCheckpointer` and its kin.

A path is written by `holdfast.save`: it is there whole or not at all, and durable when `save`
returns. So the asynchronous checkpointers wait too.
"""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import handlers, item_forms, metadata
from holdfast.interop.orbax.errors import CheckpointNotFoundError
from holdfast.interop.orbax.records import DEFAULT_ITEM, RECORD, StepRecord
from holdfast.interop.orbax.run_reader import RunReader
from holdfast.interop.orbax.step import ANY_NAME

STEP = 0
"""The step under which `holdfast.save` stores a state."""


class Checkpointer:
    """Save and restore checkpoints at paths, each as the handler says.

    Args:
        handler: Says with which arguments an item is saved.
    """

    def __init__(self, handler: Any, *_: Any, **__: Any) -> None:
        self._handler = handler
        self._save_args, self._restore_args = handlers.args_of(handler)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def handler(self) -> Any:
        """The handler."""
        return self._handler

    def save(
        self,
        directory: str | os.PathLike[str],
        *items: Any,
        force: bool = False,
        custom_metadata: Any = None,
        **named: Any,
    ) -> None:
        """Save an item to the new path `directory`; it is durable when this returns.

        Args:
            directory: The path.
            items: The item, or its arguments.
            force: Replace what an earlier save made there. It stays until the new one is complete.
            custom_metadata: JSON about the checkpoint.
            named: `args`, or the fields of the arguments.

        Raises:
            InvalidArgumentError: The path exists, or the item cannot be saved.
        """
        arguments = self._given(self._save_args, items, named, "save")
        is_default = not isinstance(arguments, ocp_args.Composite)
        named_items = {DEFAULT_ITEM: arguments} if is_default else dict(arguments.items())
        saved = {name: item_forms.saved(argument, name) for name, argument in named_items.items()}
        record = StepRecord(
            items={name: item for name, (_, item) in saved.items()},
            is_default=is_default,
            time=datetime.now(tz=UTC),
            custom_metadata=custom_metadata,
        )
        path = _path(directory)
        if os.path.lexists(path) and not force:
            raise InvalidArgumentError(
                f"save to {path}: it exists; give a new path, or replace it with force=True "
                "(overwrite=True in v1)"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {name: value for name, (value, _) in saved.items()}
        holdfast.save(path, {**state, RECORD: record.encoded()}, overwrite=force)

    def restore(self, directory: str | os.PathLike[str], *items: Any, **named: Any) -> Any:
        """Restore the checkpoint at the path `directory`, also one that Orbax wrote.

        Args:
            directory: The path: of a checkpoint, or of a step or one item in the directory of a
                `CheckpointManager`, as `DIRECTORY/1000` and `DIRECTORY/1000/ITEM`.
            items: The item wanted, or its arguments; none restores it as it was saved.
            named: `args`, or the fields of the arguments.

        Raises:
            CheckpointNotFoundError: A `FileNotFoundError`: there is no checkpoint.
            InvalidArgumentError, StructureMismatchError: It is not as wanted.
            CheckpointDamagedError: It cannot be read.
        """
        place = located(_path(directory))
        record = place.reader.step_record(place.step)
        args = self._given(self._restore_args, items, named, "restore")
        item = place.item or (DEFAULT_ITEM if record.is_default else None)
        if item is not None:
            return place.reader.restore(place.step, {item: args})[item]
        if not isinstance(args, ocp_args.Composite):
            raise InvalidArgumentError(
                f"restore {directory}: expected a Composite, found {type(args).__name__}; it has "
                f"the items {', '.join(record.items)}"
            )
        item_arguments = dict(args.items()) or dict.fromkeys(record.items)
        return ocp_args.as_composite(place.reader.restore(place.step, item_arguments))

    def _given(self, kind: Any, items: tuple[Any, ...], named: dict[str, Any], call: str) -> Any:
        arguments = named.pop("args", None)
        if arguments is None and len(items) == 1 and isinstance(items[0], ocp_args.CheckpointArgs):
            arguments = items[0]
        if arguments is not None:
            return ocp_args.checked(arguments, call)
        return kind(*items, **named)

    def metadata(self, directory: str | os.PathLike[str]) -> Any:
        """Return the metadata of the checkpoint at a path.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
        """
        located_at = located(_path(directory))
        record = located_at.reader.step_record(located_at.step)
        entries = {name: metadata.of_item(item) for name, item in record.items.items()}
        items = entries[DEFAULT_ITEM] if record.is_default else ocp_args.as_composite(entries)
        return metadata.of_step(record, items)

    def wait_until_finished(self) -> None:
        """Return at once: a save is durable when it returns."""

    def check_for_errors(self) -> None:
        """Return at once: a save raises its own errors."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


class AsyncCheckpointer(Checkpointer):
    """A `Checkpointer`. Its `save` waits as well."""

    def cancel(self) -> None:
        """Return at once: no save is in progress."""


class PyTreeCheckpointer(Checkpointer):
    """A `Checkpointer` for pytrees. The arguments of Orbax's are taken and have no effect."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(handlers.PyTreeCheckpointHandler())


class StandardCheckpointer(Checkpointer):
    """A `Checkpointer` for pytrees. The arguments of Orbax's are taken and have no effect."""

    def __init__(self, **_: Any) -> None:
        super().__init__(handlers.StandardCheckpointHandler())

    def restore(
        self,
        directory: str | os.PathLike[str],
        target: Any = None,
        *,
        strict: bool = True,
        **_: Any,
    ) -> Any:
        """Restore the checkpoint at a path, like `target`; see `args.StandardRestore`."""
        if isinstance(target, ocp_args.CheckpointArgs):
            return super().restore(directory, target)
        return super().restore(directory, args=ocp_args.StandardRestore(target, strict=strict))


def _path(directory: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.fspath(directory)))


@dataclasses.dataclass(frozen=True, slots=True)
class Located:
    """What is at a path: a step that `reader` reads, and the item, if the path is of one."""

    reader: RunReader
    step: int
    item: str | None = None


def located(path: Path) -> Located:
    """Return what is at a path: a checkpoint, or a step or an item of a manager's directory.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
    """
    reader = RunReader(path)
    if STEP in reader.saved_steps() and (reader.directory == path or reader.is_old(STEP)):
        return Located(reader, STEP)
    for folder, name, item in (
        (path.parent, path.name, None),
        (path.parent.parent, path.parent.name, path.name),
    ):
        match = ANY_NAME.fullmatch(name)
        if match is None or not folder.is_dir():
            continue
        reader, step = RunReader(folder), int(match[1])
        if step in reader.saved_steps() and (
            item is None or item in reader.step_record(step).items
        ):
            return Located(reader, step, item)
    raise CheckpointNotFoundError(f"restore {path}: there is no checkpoint")
