"""Define `CheckpointManager` with the interface of Orbax, on a run of Holdfast.

Invariants:
- Steps are listed once and then kept up to date by the manager's own calls, until `reload`.
- The run is opened for writing by the first save. Until then nothing is written.
- A save that was accepted becomes durable, or the next call that can raise reports its failure.

See docs/decisions/0027.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

from holdfast.building import new_content
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    SaveFailedError,
    StepOrderError,
    StorageError,
)
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import (
    handlers,
    item_forms,
    metadata,
    orbax_directory,
    records,
    shared_run,
)
from holdfast.interop.orbax import options as ocp_options
from holdfast.interop.orbax.checkpoint_managers import preservation_policy as preservation
from holdfast.interop.orbax.checkpoint_managers import save_decision_policy as decisions
from holdfast.interop.orbax.errors import CheckpointNotFoundError, StepAlreadyExistsError
from holdfast.interop.orbax.options import CheckpointManagerOptions
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.records import DEFAULT_ITEM, METRICS, RECORD, StepRecord
from holdfast.interop.orbax.run_reader import RunReader

ROOT_METADATA = "root_metadata.json"

log = logging.getLogger(__name__)


class CheckpointManager:
    """Save and restore checkpoints by Orbax's calls, stored and protected by Holdfast.

    Args:
        directory: The program's directory. The run is in its folder `holdfast`. Checkpoints that
            Orbax left in it are listed and restored too.
        checkpointers: Checkpointers by item, or one, as in old programs.
        options: See `CheckpointManagerOptions`; Orbax's are taken too.
        metadata: JSON about the run, stored when it is made.
        item_names: The names of items that `save` takes in a `Composite`.
        item_handlers: Handlers by item, or one.
        logger: Taken for compatibility: Holdfast records events by itself.
        handler_registry: Handlers by item.

    Raises:
        InvalidArgumentError: An option cannot be honoured, or excludes another one.
        StorageError: The directory cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: Any = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        del logger
        is_read = bool(getattr(options, "read_only", False))
        with contextlib.nullcontext() if is_read else shared_run.opening(directory):
            self._options = ocp_options.check(
                CheckpointManagerOptions() if options is None else options
            )
            self._directory = Path(os.path.abspath(os.fspath(directory)))
            if self._options.create:
                try:
                    self._directory.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise StorageError(
                        f"open {self._directory}: expected a directory that can be made, found "
                        f"{error}"
                    ) from error
            self._decides = ocp_options.decision_policy(self._options)
            self._keeps = ocp_options.keeping_policy(self._options)
            registry = getattr(handler_registry, "handlers", None)
            self._handlers, self._is_default = handlers.of_items(
                checkpointers, item_names, item_handlers, registry
            )
            self._names = frozenset(item_names or ())
            self._reader = RunReader(self._directory, ocp_options.name_format(self._options))
            self._run: shared_run.SharedRun | None = None
            self._is_closed = False
            self._unfinished = False
            self._jax_preempted_at: int | None = None
            self._infos: list[decisions.PolicyCheckpointInfo] = []
            self._replaced: dict[int, tuple[decisions.PolicyCheckpointInfo, bool]] = {}
            """What saves in progress replace, by step, and whether Orbax wrote it."""
            self._load_infos(self._options.lightweight_initialize)
            self._root_metadata = dict(metadata or {}) if self._options.read_only else {}
            if metadata is not None and self._options.save_root_metadata:
                self._write_root_metadata(metadata)
        if jax.process_count() > 1 and not self._options.read_only:
            # Checkpoints in the memory of other hosts are found by their agents alone.
            self._opened()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def directory(self) -> Any:
        """The program's directory, as a path of etils if that is installed."""
        return path_of(self._directory)

    # The steps.

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return the steps, ascending; with `read`, list the run again."""
        if read:
            self.reload()
        return [info.step for info in self._infos]

    @property
    def infos(self) -> Sequence[decisions.PolicyCheckpointInfo]:
        """The checkpoints as policies see them, ascending."""
        return tuple(self._infos)

    def latest_step(self) -> int | None:
        """Return the newest step; None if there is none."""
        return self._infos[-1].step if self._infos else None

    def best_step(self) -> int | None:
        """Return the step that `best_fn` ranks highest; without `best_fn` the newest one."""
        if self._options.best_fn is None:
            return self.latest_step()
        reverse = self._options.best_mode == "min"
        ranked = preservation.ranking(self._infos, self._options.best_fn, reverse=reverse)
        return self._infos[ranked[-1]].step if ranked else None

    def reload(self) -> None:
        """List the run again."""
        if self._run is not None:
            self._settle()
        self._reader.forget_step()
        self._load_infos(is_light=False)

    def _load_infos(self, is_light: bool) -> None:
        epoch = datetime.min.replace(tzinfo=UTC)
        infos = []
        for step in self._reader.saved_steps():
            if is_light:
                infos.append(decisions.PolicyCheckpointInfo(step, epoch))
                continue
            # Another process may have removed it since it was listed.
            with contextlib.suppress(CheckpointNotFoundError):
                record = self._reader.info(step)
                infos.append(decisions.PolicyCheckpointInfo(step, record.time, record.metrics))
        self._infos = infos

    # Saving.

    def should_save(self, step: int) -> bool:
        """Return whether the policy saves `step`; a step up to the newest one is never saved."""
        return self._is_due(_step(step, "should_save"))

    def _is_due(self, step: int) -> bool:
        latest = self.latest_step()
        if self._options.read_only or (latest is not None and latest >= step):
            return False
        return self._ask(self._decides, step)

    def _is_due_in_ram(self, step: int) -> bool:
        """Return whether `step` is saved to RAM alone if it is not due; for managers with tiers."""
        del step
        return False

    def _ask(self, policy: Any, step: int) -> bool:
        checks = self._options.enable_should_save_is_saving_in_progress_check
        context = decisions.DecisionContext(
            is_saving_in_progress=checks and self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        info = decisions.PolicyCheckpointInfo(step, datetime.now(tz=UTC))
        previous = tuple(entry for entry in self._infos if entry.step != step)
        return bool(policy.should_save(info, previous_steps=previous, context=context))

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save items if the policy saves `step`, or with `force`.

        Args:
            step: The training step.
            items: The item, or items by name, as old programs pass them.
            save_kwargs: Arguments for `items`, as old programs pass them.
            metrics: JSON about the step, for `best_fn` and policies.
            force: Save whatever the policy decides. An existing step is not overwritten.
            args: What is saved: arguments for one unnamed item, or a `Composite`.
            custom_metadata: JSON about the step.

        Returns:
            Whether the step is being saved.

        Raises:
            StepAlreadyExistsError: The step is saved already.
            InvalidArgumentError: The arguments do not fit together.
            SaveFailedError: An earlier save failed.
        """
        self._check_open("save")
        number = _step(step, "save")
        arguments = self._save_args(items, save_kwargs, args)
        is_due = bool(force) or self._is_due(number)
        is_in_ram = not is_due and self._is_due_in_ram(number)
        if not is_due and ((self._run is None and not is_in_ram) or self._options.read_only):
            return False
        if is_due and number in self.all_steps():
            raise StepAlreadyExistsError(
                f"save step {number}: it is already saved in {self._directory}; delete it first"
            )
        saved = self._state(arguments, metrics, custom_metadata)
        return self._submit(number, saved, metrics, is_due=is_due, is_in_ram=is_in_ram)

    def overwrite(
        self,
        step: int,
        args: Any,
        *,
        metrics: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save as `save`, also in place of a checkpoint of `step`, which must be the newest.

        It stays until the new one is durable.

        Returns:
            Whether the step is being saved; if not, nothing has changed.

        Raises:
            StepOrderError: There is a later checkpoint, which this would abandon.
            InvalidArgumentError, SaveFailedError: As `save`.
        """
        number = _step(step, "save")
        if number not in self.all_steps():
            return self.save(
                number, args=args, metrics=metrics, force=force, custom_metadata=custom_metadata
            )
        self._check_open("save")
        arguments = self._save_args(None, None, args)
        newest = self.all_steps()[-1]
        if number < newest and force:
            raise StepOrderError(
                f"save step {number} again: expected the newest step, which is {newest}; delete "
                "the later ones first, or save a later step"
            )
        is_newest = number == newest and not self._options.read_only
        if not is_newest or not (force or self._ask(self._decides, number)):
            return False
        saved = self._state(arguments, metrics, custom_metadata)
        return self._submit(number, saved, metrics, overwrites=True)

    def _submit(
        self,
        number: int,
        saved: tuple[dict[str, Any], StepRecord],
        metrics: Any,
        *,
        is_due: bool = True,
        is_in_ram: bool = False,
        overwrites: bool = False,
    ) -> bool:
        state, record = saved
        run = self._opened()
        self._finalize_if_done(run)
        is_old = self._reader.is_old(number)
        try:
            is_taken = run.save(
                number, state, _numbers(metrics), is_due=is_due, overwrites=overwrites
            )
        except SaveFailedError as error:
            self._drop_failed(error.steps)
            raise
        if is_taken:
            self._unfinished = True
            if overwrites:
                info = next(info for info in self._infos if info.step == number)
                self._replaced.setdefault(number, (info, is_old))
                self._drop([number])
            self._reader.note(number, record)
            if not is_in_ram:
                self._note_saved(number, record, run)
            if not self._options.enable_async_checkpointing:
                self.wait_until_finished()
        return is_taken

    def _save_args(self, items: Any, save_kwargs: Any, args: Any) -> dict[str, Any]:
        """Return the arguments by item, and decide whether there is one unnamed item."""
        if items is None and args is None:
            raise InvalidArgumentError("save: expected args=..., found none")
        if isinstance(items, ocp_args.CheckpointArgs):
            raise InvalidArgumentError("save: pass arguments by name, as args=...")
        if args is None:
            return self._args_of_items(items, save_kwargs, 0)
        checked = ocp_args.checked(args, "save")
        self._set_default(not isinstance(checked, ocp_args.Composite), "save")
        if not isinstance(checked, ocp_args.Composite):
            return {DEFAULT_ITEM: checked}
        reserved = [name for name in checked if name in records.RESERVED]
        unknown = [name for name in checked if self._names and name not in self._names]
        if reserved or unknown:
            raise InvalidArgumentError(
                f"save: the item {(reserved or unknown)[0]!r} is "
                + ("reserved" if reserved else f"not one of {', '.join(sorted(self._names))}")
            )
        # None stands for an item that this step does not have.
        given = {name: entry for name, entry in checked.items() if entry is not None}
        if checked and not given:
            raise InvalidArgumentError(
                f"save: expected arguments of at least one item, found None for "
                f"{', '.join(checked)}"
            )
        arguments = {name: ocp_args.checked(entry, f"save {name}") for name, entry in given.items()}
        for name in arguments.keys() & self._handlers.keys():
            handlers.check_save_args(self._handlers[name], arguments[name], name)
        return arguments

    def _args_of_items(self, items: Any, kwargs: Any, index: int) -> dict[str, Any]:
        """Return arguments (0: to save, 1: to restore) for items as old programs pass them."""
        if self._is_default is None:
            self._is_default = True
        if self._is_default:
            items, kwargs = {DEFAULT_ITEM: items}, {DEFAULT_ITEM: kwargs}
        arguments = {}
        for name in {**(items or {}), **(kwargs or {})}:
            handler = self._handlers.get(name, handlers.StandardCheckpointHandler())
            kind = handlers.args_of(handler)[index]
            more = (kwargs or {}).get(name) or {}
            arguments[name] = kind((items or {}).get(name), **more)
        return arguments

    def _set_default(self, is_default: bool, call: str) -> None:
        if self._is_default is None:
            self._is_default = is_default
        if self._is_default and not is_default:
            raise InvalidArgumentError(
                f"{call}: expected arguments of one unnamed item, found a Composite; this manager "
                "has one unnamed item"
            )
        if not self._is_default and is_default:
            raise InvalidArgumentError(
                f"{call}: expected a Composite, found arguments of one unnamed item; this manager "
                "has items with names"
            )

    def _state(
        self, given: Mapping[str, Any], metrics: Any, custom: Any
    ) -> tuple[dict[str, Any], StepRecord]:
        saved = {name: item_forms.saved(argument, name) for name, argument in given.items()}
        record = StepRecord(
            items={name: item for name, (_, item) in saved.items()},
            is_default=bool(self._is_default),
            time=datetime.now(tz=UTC),
            metrics=None
            if metrics is None or self._options.prevent_write_metrics
            else json.loads(records.json_text(metrics, "the metrics")),
            custom_metadata=custom,
        )
        state = {name: value for name, (value, _) in saved.items()}
        return {**state, RECORD: record.encoded()}, record

    def _opened(self) -> shared_run.SharedRun:
        if self._run is None:
            self._run = shared_run.acquire(self._reader.directory, self, self._run_options)
        return self._run

    def _run_options(self) -> Mapping[str, Any]:
        """Return further arguments of the run's manager."""
        return {}

    def _note_saved(self, step: int, record: StepRecord, run: shared_run.SharedRun) -> None:
        info = decisions.PolicyCheckpointInfo(step, record.time, record.metrics)
        self._infos = sorted([*self._infos, info], key=lambda entry: entry.step)
        kept = list(
            self._keeps.should_preserve(
                tuple(self._infos), context=preservation.PreservationContext()
            )
        )
        if len(kept) != len(self._infos):
            raise InvalidArgumentError(
                f"{type(self._keeps).__name__}.should_preserve: expected {len(self._infos)} bools, "
                f"found {len(kept)}"
            )
        kept[-1] = True
        kept = [
            is_kept or self._reader.is_old(entry.step)
            for entry, is_kept in zip(self._infos, kept, strict=True)
        ]
        for gone in (i.step for i, stays in zip(self._infos, kept, strict=True) if not stays):
            run.doomed.add(gone)
            self._reader.forget_step(gone)
        self._infos = [i for i, stays in zip(self._infos, kept, strict=True) if stays]

    def _drop(self, steps: Sequence[int]) -> None:
        self._infos = [info for info in self._infos if info.step not in steps]

    def _drop_failed(self, steps: Sequence[int]) -> None:
        """Forget steps whose save failed; what it would have replaced is still there."""
        self._drop(steps)
        for step in self._replaced.keys() & set(steps):
            self._reader.forget_step(step)
            self._infos = sorted(
                [*self._infos, self._replaced.pop(step)[0]], key=lambda entry: entry.step
            )

    # Waiting.

    def wait_until_finished(self, *, timeout_secs: float | None = None) -> None:
        """Wait until all saves are durable.

        Args:
            timeout_secs: The longest wait; None takes that of `AsyncOptions`.

        Raises:
            SaveFailedError: Some failed.
            WaitTimeoutError: `AsyncOptions.timeout_secs` has passed.
        """
        if self._run is not None and not self._is_closed:
            self._wait(self._run, timeout_secs)

    def _wait(self, run: shared_run.SharedRun, timeout_secs: float | None = None) -> None:
        asynchronous = self._options.async_options
        if timeout_secs is None and asynchronous is not None:
            timeout_secs = asynchronous.timeout_secs
        try:
            run.wait(timeout_secs)
        except SaveFailedError as error:
            self._drop_failed(error.steps)
            raise
        for step, (_, is_old) in self._replaced.items():
            if is_old:
                self._reader.delete_old(step)
        self._replaced.clear()
        self._finalize_if_done(run)

    def _finalize_if_done(self, run: shared_run.SharedRun) -> None:
        asynchronous = self._options.async_options
        if not self._unfinished or asynchronous is None:
            return
        if asynchronous.post_finalization_callback is not None and not run.is_saving():
            self._unfinished = False
            asynchronous.post_finalization_callback()

    def _settle(self) -> None:
        """Wait for saves; their failures are raised by the next call that reports them."""
        shared = shared_run.opened(self._reader.directory)
        if shared is not None and shared.pending:
            shared.settle_saves()

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is not durable yet."""
        return self._run is not None and self._run.is_saving()

    def check_for_errors(self) -> None:
        """Raise the failure of a save that has ended.

        Raises:
            SaveFailedError: A save failed.
        """
        if self._run is not None and not self._run.is_saving():
            self._wait(self._run)

    def reached_preemption(self, step: int) -> bool:
        """Return whether a preemption was announced and `step`, or an earlier one, is its last.

        Notices that JAX has received count too: its service agrees on a step with all processes,
        which call this, or `should_save`, at each step.
        """
        number = _step(step, "step")
        if self._run is not None and self._run.manager.reached_preemption(number):
            return True
        if self._jax_preempted_at is None and _jax_reached_preemption(number):
            self._jax_preempted_at = number
        return self._jax_preempted_at is not None and number >= self._jax_preempted_at

    # Reading.

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restore items of `step`, or of the newest step if it is None.

        Args:
            step: The step.
            items: The item wanted, or items by name, as old programs pass them.
            restore_kwargs: Arguments for `items`, as old programs pass them.
            directory: Another directory to restore from.
            args: What is restored: arguments for one unnamed item, or a `Composite`. None
                restores everything as it was saved.

        Returns:
            The item, or a `Composite` of items.

        Raises:
            CheckpointNotFoundError, ItemNotFoundError: A `FileNotFoundError`: it is not there.
            InvalidArgumentError, StructureMismatchError: A `ValueError`: it is not as wanted.
            CheckpointDamagedError: It cannot be read.
        """
        self._check_open("restore")
        reader = self._reader
        if directory is not None:
            reader = RunReader(Path(os.path.abspath(os.fspath(directory))))
        self._settle()
        if step is None:
            steps = reader.saved_steps()
            if not steps:
                raise CheckpointNotFoundError(
                    f"restore: there is no checkpoint in {directory or self._directory}"
                )
            step = max(steps) if directory is not None else self.latest_step() or max(steps)
        number = _step(step, "restore")
        with reader.sending_errors(number):
            record = reader.step_record(number)
            arguments = self._restore_args(record, items, restore_kwargs, args)
            restored = reader.restore(number, arguments)
        if record.is_default and not (self._is_default is False and args is None):
            return restored[DEFAULT_ITEM]
        if record.metrics is not None and args is None and items is None:
            restored[METRICS] = record.metrics
        return ocp_args.as_composite(restored)

    def restore_items(self, step: int, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return items of `step` by name, each as its arguments say; None: all as saved.

        Raises:
            CheckpointNotFoundError, ItemNotFoundError: Something is not there.
        """
        self._check_open("restore")
        self._settle()
        with self._reader.sending_errors(step):
            if wanted is None:
                wanted = dict.fromkeys(self._reader.step_record(step).items)
            return self._reader.restore(step, wanted)

    @property
    def run_directory(self) -> Path:
        """The run's directory."""
        return self._reader.directory

    def item_files(self, step: int, name: str) -> dict[str, bytes]:
        """Return the files of an item of a foreign handler, of all processes, by their paths.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the step.
        """
        return self._reader.item_files(step, name)

    def step_record(self, step: int) -> StepRecord:
        """Return what the checkpoint of `step` has.

        Raises:
            CheckpointNotFoundError: It is not there.
        """
        return self._reader.step_record(step)

    def _restore_args(
        self, record: StepRecord, items: Any, kwargs: Any, args: Any
    ) -> dict[str, Any]:
        if isinstance(items, ocp_args.CheckpointArgs):
            raise InvalidArgumentError("restore: pass arguments by name, as args=...")
        if self._is_default is None:
            self._is_default = record.is_default
        if args is None and items is None and kwargs is None:
            return dict.fromkeys(record.items)
        if args is None:
            return self._args_of_items(items, kwargs, 1)
        checked = ocp_args.checked(args, "restore")
        self._set_default(not isinstance(checked, ocp_args.Composite), "restore")
        if not isinstance(checked, ocp_args.Composite):
            return {DEFAULT_ITEM: checked}
        return {
            name: None if argument is None else ocp_args.checked(argument, f"restore {name}")
            for name, argument in (checked.items() or dict.fromkeys(record.items).items())
        }

    def metrics(self, step: int) -> Any:
        """Return the metrics of `step`; None if it has none or is not there."""
        try:
            return self._reader.info(_step(step, "metrics")).metrics
        except CheckpointNotFoundError:
            return None

    def metadata(self, step: int | None = None) -> Any:
        """Return the metadata of `step`, or without a step that of the run.

        Raises:
            CheckpointNotFoundError: The step is not there.
        """
        if step is None:
            return metadata.RootMetadata(custom_metadata=self._read_root_metadata())
        self._settle()
        record = self._reader.step_record(_step(step, "metadata"))
        entries = {name: metadata.of_item(item) for name, item in record.items.items()}
        if record.metrics is not None:
            # Orbax lists them as an item, whose values are in `metrics` of the step.
            entries = {METRICS: None} | entries
        items = entries[DEFAULT_ITEM] if record.is_default else ocp_args.as_composite(entries)
        return metadata.of_step(record, items)

    def item_metadata(self, step: int) -> Any:
        """Return the metadata of the items of `step`."""
        if step is None:
            raise InvalidArgumentError("item_metadata: expected a step, found None")
        return self.metadata(step).item_metadata

    def _write_root_metadata(self, given: Mapping[str, Any]) -> None:
        path = self._directory / ROOT_METADATA
        is_kept = path.exists() or self._has_root_metadata_of_orbax()
        if jax.process_index() == 0 and not self._options.read_only and not is_kept:
            text = records.json_text(dict(given), "the metadata of the run")
            with new_content(path, "write the metadata of the run") as file:
                file.write(text.encode())

    def _has_root_metadata_of_orbax(self) -> bool:
        try:
            return bool(orbax_directory.read_root_metadata(self._directory))
        except CheckpointDamagedError as error:
            log.warning("the metadata of the run cannot be read: %s", error)
            return True

    def _read_root_metadata(self) -> dict[str, Any]:
        path = self._directory / ROOT_METADATA
        if path.exists():
            content: dict[str, Any] = json.loads(path.read_text())
            return content
        return orbax_directory.read_root_metadata(self._directory) or self._root_metadata

    # Ending.

    def delete(self, step: int) -> None:
        """Remove the checkpoint of `step`.

        Raises:
            CheckpointNotFoundError: It is not there.
        """
        self._check_open("delete")
        number = _step(step, "delete")
        if self._options.read_only:
            log.warning("delete step %d: the manager is read-only; nothing is deleted", number)
            return
        if number not in self.all_steps():
            raise CheckpointNotFoundError(
                f"delete step {number}: {self._directory} has no checkpoint of it"
            )
        if self._reader.is_old(number):
            self._reader.delete_old(number)
        else:
            run = self._opened()
            self._settle()
            run.delete(number)
        self._drop([number])
        self._reader.forget_step(number)

    def delete_item(self, step: int, name: str) -> None:
        """Remove one item of the checkpoint of `step`, which must be the newest.

        A checkpoint does not change: it is saved again without the item, in the place of the one
        that has it, which stays until the new one is durable.

        Raises:
            CheckpointNotFoundError, ItemNotFoundError: Something is not there.
            StepOrderError: There is a later checkpoint.
            InvalidArgumentError: It is the only item.
            SaveFailedError: It could not be saved again.
        """
        self._check_open("delete")
        if self._options.read_only:
            log.warning("delete %r of step %d: the manager is read-only", name, step)
            return
        self._settle()
        if self._reader.is_old(step):
            self._reader.delete_old_item(step, name)
            return
        saved = self._reader.state_without(step, name)
        newest = self.all_steps()[-1]
        if step < newest:
            raise StepOrderError(
                f"delete {name!r} of step {step}: expected the newest step, which is {newest}, "
                "because the checkpoint is saved again without it; delete all of the step"
            )
        self._submit(step, saved, saved[1].metrics, overwrites=True)
        self.wait_until_finished()

    def cancel(self, step: int | None = None) -> None:
        """Remove the checkpoint of `step`, or those that are being saved, once they are saved."""
        self._check_open("cancel")
        pending = () if self._run is None else self._run.pending
        for number in sorted(pending) if step is None else [step]:
            if number in self.all_steps():
                self.delete(number)

    def close(self) -> None:
        """Wait until all saves are durable, and release the run. Further calls do nothing.

        Raises:
            SaveFailedError: A save failed that no earlier call has reported.
        """
        if self._is_closed:
            return
        run = self._run
        if run is None:
            self._is_closed = True
            return
        try:
            self._wait(run)
        finally:
            self._is_closed, self._run = True, None
            run.release(self)

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise InvalidArgumentError(
                f"{call}: the manager of {self._directory} is closed; create another one"
            )


def _jax_reached_preemption(step: int) -> bool:
    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:
        # The service is switched off.
        return False


def _step(step: Any, call: str) -> int:
    try:
        return operator.index(step)
    except TypeError as error:
        raise InvalidArgumentError(f"{call}: expected a step, found {step!r}") from error


def _numbers(metrics: Any) -> dict[str, float] | None:
    """Return the metrics that are numbers with names, which Holdfast shows."""
    if not isinstance(metrics, Mapping):
        return None
    numbers = {}
    for name, value in metrics.items():
        if isinstance(name, str) and not isinstance(value, bool | str):
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                continue
    return numbers or None
