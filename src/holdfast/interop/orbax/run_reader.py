"""Read the checkpoints of a program's directory: of its run, and those that Orbax left there.

Invariant: a step of the run hides one of Orbax; an import puts a checkpoint in both places.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import holdfast
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    NotARunError,
    StepNotFoundError,
    StepUncommittedError,
)
from holdfast.interop.orbax import outlines, records, shared_run
from holdfast.interop.orbax.errors import CheckpointNotFoundError, ItemNotFoundError
from holdfast.interop.orbax.item_forms import FolderState, ItemRestore
from holdfast.interop.orbax.old_steps import OldSteps
from holdfast.interop.orbax.records import RECORD, StepRecord


def run_directory(directory: Path) -> Path:
    """Return where the run of a program's `directory` is: itself, if it is a run, or its folder."""
    try:
        holdfast.open_run(directory).close()
    except NotARunError:
        return directory / shared_run.FOLDER
    return directory


class RunReader:
    """Reads a run, beside whatever works on it.

    Args:
        directory: The directory that the program gave.
        name_format: What names the folders that Orbax wrote; None: plain numbers.
    """

    def __init__(self, directory: Path, name_format: Any = None) -> None:
        self.directory = run_directory(directory)
        self._known: dict[int, StepRecord] = {}
        self._old = OldSteps(directory, name_format)
        self._of_run: frozenset[int] = frozenset()
        self._is_awaited = False
        """Whether other processes may wait for this one in a restore. See `sending_errors`."""

    def _source(self) -> Any:
        """Return what reads the run: in jobs of several processes its manager; None: no run."""
        shared = shared_run.opened(self.directory)
        if shared is not None and jax.process_count() > 1:
            return shared.manager
        try:
            return holdfast.open_run(self.directory)
        except NotARunError:
            return None

    def saved_steps(self) -> list[int]:
        """Return the steps that can be restored now."""
        source = self._source()
        shared = shared_run.opened(self.directory)
        # Those that policies gave up may be removed at any moment, in one process before another.
        doomed = set() if shared is None else shared.doomed
        self._of_run = frozenset([] if source is None else source.all_steps()) - doomed
        return sorted(self._of_run.union(self._old.old_steps()))

    def is_old(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is one that Orbax wrote."""
        return step not in self._known and step not in self._of_run and step in self._old

    def info(self, step: int) -> StepRecord:
        """Return the time and the metrics of `step`; its items may be missing.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the step.
        """
        return self._old.info(step) if self.is_old(step) else self.step_record(step)

    def delete_old(self, step: int) -> None:
        """Remove the folder that Orbax wrote for `step`."""
        if jax.process_index() == 0:
            self._old.delete(step)

    def note(self, step: int, record: StepRecord) -> None:
        """Remember the record of a step that this process saves."""
        self._known[step] = record
        self._of_run |= {step}

    def forget_step(self, step: int | None = None) -> None:
        """Read the record of `step` anew, or all."""
        for number in list(self._known) if step is None else [step]:
            self._known.pop(number, None)
        self._of_run -= {step}

    def step_record(self, step: int) -> StepRecord:
        """Return what the checkpoint of `step` has.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the step.
            InvalidArgumentError: Another program saved it.
        """
        record = self._known.get(step)
        if record is None and self.is_old(step):
            return self._old.record_of(step)
        if record is None:
            values, _ = self._values(step)
            text = values.get(RECORD)
            if not isinstance(text, str):
                raise InvalidArgumentError(
                    f"read step {step} of {self.directory}: it was saved with Holdfast's own "
                    "interface; restore it with holdfast.open_run"
                )
            record = self._known[step] = records.decoded(text)
        return record

    def _values(self, step: int) -> tuple[Mapping[str, Any], Any]:
        source = self._source()
        if source is None:
            raise self._missing(step)
        try:
            metadata = source.metadata(step)
        except (StepNotFoundError, StepUncommittedError) as error:
            raise self._missing(step) from error
        return metadata.values, source

    def _missing(self, step: int) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"restore step {step}: {self.directory} has no checkpoint of it"
        )

    @contextlib.contextmanager
    def sending_errors(self, step: int) -> Iterator[None]:
        """Send an error of the block to the other processes of a job, which restore `step` too.

        They wait in the manager's restore for this process, which has not got there.
        """
        # They read what Orbax wrote each for itself.
        self._is_awaited = jax.process_count() > 1 and not self.is_old(step)
        try:
            yield
        except Exception as error:
            shared = shared_run.opened(self.directory)
            if self._is_awaited and shared is not None:
                refusal = f"{type(error).__name__} of process {jax.process_index()}: {error}"
                with contextlib.suppress(HoldfastError):
                    shared.manager.restore(step, like={refusal: 0})
            raise

    def restore(self, step: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return items of the checkpoint of `step` by name.

        Args:
            step: The step.
            wanted: The arguments by item; None restores an item as it was saved.

        Raises:
            CheckpointNotFoundError, ItemNotFoundError: Something is not there.
            InvalidArgumentError, StructureMismatchError: It is not as it is wanted.
        """
        record = self.step_record(step)
        missing = [name for name in wanted if name not in record.items]
        if missing:
            raise ItemNotFoundError(
                f"restore step {step}: expected the item {missing[0]!r}, found "
                f"{', '.join(record.items) or 'none'}"
            )
        items = {
            name: ItemRestore(name, record.items[name], target) for name, target in wanted.items()
        }
        if self.is_old(step):
            return {name: self._restore_old(step, name, item) for name, item in items.items()}
        read, folders = self._read(step, items)
        return {
            name: item.finish_folder(folders[name])
            if item.is_folder
            else item.finish({p[1:]: leaf for p, leaf in read.items() if p[0] == name})
            for name, item in items.items()
        }

    def _read(
        self, step: int, items: Mapping[str, ItemRestore]
    ) -> tuple[dict[tuple[Any, ...], Any], Mapping[str, Any]]:
        """Return the leaves of items by path, and by name the files that processes have saved."""
        like = {
            (name, *path): leaf
            for name, item in items.items()
            for path, leaf in item.wanted.items()
        }
        source = self._source()
        if source is None:
            raise self._missing(step)
        read: dict[tuple[Any, ...], Any] = {}
        if like or self._is_awaited:
            # From here on its errors leave the calls of the other processes too.
            self._is_awaited = False
            try:
                tree = source.restore(step, like=outlines.nested(like), partial=".", cast=True)
            except (StepNotFoundError, StepUncommittedError) as error:
                # Another process has removed it.
                self.forget_step(step)
                raise self._missing(step) from error
            read = {path: value_at(tree, path) for path in like}
        has_folder = any(item.is_folder for item in items.values())
        return read, source.process_values(step) if has_folder else {}

    def state_without(self, step: int, removed: str) -> tuple[dict[str, Any], StepRecord]:
        """Return what saves the checkpoint of `step` again without one item, and its record.

        Raises:
            CheckpointNotFoundError, ItemNotFoundError: Something is not there.
            InvalidArgumentError: It has no other item.
        """
        record = self.step_record(step)
        if removed not in record.items:
            raise ItemNotFoundError(
                f"delete {removed!r} of step {step}: there is no such item; there are "
                f"{', '.join(record.items)}"
            )
        kept = {name: item for name, item in record.items.items() if name != removed}
        if not kept:
            raise InvalidArgumentError(
                f"delete {removed!r} of step {step}: it is the only item; delete the checkpoint"
            )
        items = {name: ItemRestore.as_stored(name, item) for name, item in kept.items()}
        read, folders = self._read(step, items)
        leaves = outlines.nested(read) if read else {}
        state = {
            name: FolderState(_own_files(folders[name])) if item.is_folder else leaves.get(name, {})
            for name, item in items.items()
        }
        record = dataclasses.replace(record, items=kept)
        return {**state, RECORD: record.encoded()}, record

    def delete_old_item(self, step: int, name: str) -> None:
        """Remove one item of a checkpoint that Orbax wrote."""
        self._old.delete_item(step, name)

    def item_files(self, step: int, name: str) -> dict[str, bytes]:
        """Return the files of an item of a foreign handler, of all processes, by their paths.

        Returns:
            The content of each file; nothing if `step` has no such item, or it has no files.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the step.
            CheckpointDamagedError: It cannot be read.
        """
        if self.is_old(step):
            return self._old.item_files(step, name)
        _, source = self._values(step)
        states = source.process_values(step).get(name, [])
        return {path: content for files in states for path, content in files.items()}

    def _restore_old(self, step: int, name: str, item: ItemRestore) -> Any:
        if item.is_folder:
            return item.restored_by_handler(self._old.item(step, name).path)
        return item.finish(self._old.read(step, name, item.record, item.wanted))


def _own_files(states: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the files that this process saves: its own; of another number of processes all."""
    if len(states) == jax.process_count():
        return dict(states[jax.process_index()])
    is_first = jax.process_index() == 0
    return {path: data for files in states for path, data in files.items() if is_first}


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return the node of nested containers at `path`."""
    for key in path:
        tree = tree[key]
    return tree
