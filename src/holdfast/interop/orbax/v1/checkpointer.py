"""Define `training.Checkpointer`, Orbax's second manager of a training's checkpoints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import shared_run
from holdfast.interop.orbax.checkpoint_manager import CheckpointManager
from holdfast.interop.orbax.checkpoint_managers import (
    preservation_policy as preservation_policies,
)
from holdfast.interop.orbax.checkpoint_managers import (
    save_decision_policy as save_decision_policies,
)
from holdfast.interop.orbax.errors import (
    ArgumentTypeError,
    CheckpointNotFoundError,
    ItemNotFoundError,
    StepAlreadyExistsError,
    TrainingStepExistsError,
)
from holdfast.interop.orbax.options import AsyncOptions, CheckpointManagerOptions
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.step import build_step_path, standard_name_format
from holdfast.interop.orbax.v1 import aliases, item_args, trees
from holdfast.interop.orbax.v1.context import Context, current
from holdfast.interop.orbax.v1.handlers import BackgroundSaveError
from holdfast.interop.orbax.v1.item_args import STATE
from holdfast.interop.orbax.v1.options import check
from holdfast.interop.orbax.v1.responses import AsyncResponse, Completions, completed


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata(trees.CheckpointMetadata):
    """One checkpoint of a `Checkpointer`: its step and metrics too."""

    step: int
    metrics: Any = None

    @property
    def time(self) -> datetime | None:
        """When it was saved."""
        return self.commit_timestamp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """What was given to the `Checkpointer` as `custom_metadata`."""

    directory: Any
    custom_metadata: Any = None


class Checkpointer:
    """Save and load the checkpoints of a training by the calls of Orbax's second interface.

    Args:
        directory: The program's directory, as for `CheckpointManager`.
        context: Options; None takes those of the `with` block around.
        save_decision_policy: When to save. None saves whenever no save is in progress.
        preservation_policy: What is kept. None keeps all.
        step_name_format: What names the folders that Orbax wrote.
        custom_metadata: JSON about the run.
        cleanup_tmp_directories: Taken for compatibility: Holdfast removes what is unfinished.
        lightweight_initialize: Whether times and metrics are left out when steps are listed.
        logger: Taken for compatibility: Holdfast records events by itself.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        context: Context | None = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        with shared_run.opening(directory):
            self._context = Context(context or current())
            check(self._context)
            self._names = step_name_format or standard_name_format()
            decide, keep = save_decision_policies, preservation_policies
            often: list[Any] = [
                decide.InitialSavePolicy(),
                decide.ContinuousCheckpointingPolicy(),
                decide.PreemptionCheckpointingPolicy(),
            ]
            options = CheckpointManagerOptions(
                save_decision_policy=save_decision_policy or decide.AnySavePolicy(often),
                preservation_policy=preservation_policy or keep.PreserveAll(),
                step_name_format=step_name_format,
                cleanup_tmp_directories=cleanup_tmp_directories,
                lightweight_initialize=lightweight_initialize,
                todelete_full_path=self._context.deletion.gcs_deletion_options.todelete_full_path,
                async_options=AsyncOptions(timeout_secs=self._context.asynchronous.timeout_secs),
            )
        self._manager = self._make_manager(
            directory, options=options, metadata=custom_metadata, logger=logger
        )
        self._directory: Any = path_of(Path(os.path.abspath(os.fspath(directory))))
        self._completions = Completions(self._manager.run_directory)
        self._failure: Exception | None = None
        """What the background part of a handler raised, until a call raises it."""

    def _make_manager(self, directory: Any, **arguments: Any) -> CheckpointManager:
        """Return the manager; for checkpointers with tiers of their own."""
        return CheckpointManager(directory, **arguments)

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
    def directory(self) -> Any:
        """The program's directory."""
        return self._directory

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The newest checkpoint; None if there is none."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata]:
        """The checkpoints, ascending, without what is in them."""
        return [
            CheckpointMetadata(
                step=info.step,
                path=build_step_path(self._directory, self._names, info.step),
                metadata=None,
                metrics=info.metrics,
                commit_timestamp_nsecs=int(info.time.timestamp() * 1e9),
            )
            for info in self._manager.infos
        ]

    def _step(self, step: int | CheckpointMetadata | None) -> int:
        """Return the step meant.

        Raises:
            CheckpointNotFoundError: It is not there.
        """
        number = step.step if isinstance(step, CheckpointMetadata) else step
        steps = self._manager.all_steps()
        if number is None and steps:
            return steps[-1]
        if number is None or number not in steps:
            raise CheckpointNotFoundError(
                f"{self._directory}: there is no checkpoint"
                + ("" if number is None else f" of step {number}")
            )
        return number

    # Saving.

    def should_save(self, step: int) -> bool:
        """Return whether the policy saves `step`."""
        return self._manager.should_save(step)

    def save(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> bool:
        """Save a pytree if the policy saves `step`, and wait until it is durable.

        Args:
            step: The training step.
            state: The pytree.
            checkpointable_name: The name under which it is saved.
            options: `force`, `overwrite`, `metrics` and `custom_metadata`, as for
                `save_checkpointables`.

        Returns:
            Whether it was saved.
        """
        return self.save_checkpointables(step, {checkpointable_name: state}, **options)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """Save checkpointables by name, and wait until they are durable.

        Args:
            step: The training step.
            checkpointables: Pytrees, and objects that a handler takes.
            options: `force`, `overwrite`, `metrics` and `custom_metadata`, as for
                `save_checkpointables_async`.

        Returns:
            Whether they were saved.
        """
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return False if response is None else bool(response.result())

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> AsyncResponse | None:
        """Save as `save`, in the background; None if the policy does not save `step`."""
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **options)

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse | None:
        """Save as `save_checkpointables`, in the background.

        Args:
            step: The training step.
            checkpointables: Pytrees, and objects that a handler takes.
            force: Save whatever the policy decides.
            overwrite: Replace a checkpoint of the same step, which stays until the new one is
                durable. It must be the newest; with `force` another one is refused.
            metrics: JSON about the step.
            custom_metadata: JSON about the step.

        Returns:
            What waits for the save; None if the policy does not save `step`.

        Raises:
            TrainingStepExistsError: A `FileExistsError`: the step is saved already.
            StepOrderError: A step that is not the newest is to be overwritten.
            Exception: What the background part of a handler raised in an earlier save, if no call
                has raised it.
        """
        self._raise_failure()
        context = current(self._context)
        arguments = item_args.save_args(checkpointables, context)
        if step in self._manager.all_steps() and not overwrite:
            raise TrainingStepExistsError(
                f"save step {step}: it is already saved in {self._directory}; pass "
                "overwrite=True, or delete it first"
            )
        save = self._manager.overwrite if overwrite else self._manager.save
        try:
            is_saved = save(
                step, args=arguments, metrics=metrics, force=force, custom_metadata=custom_metadata
            )
        except StepAlreadyExistsError as error:
            raise TrainingStepExistsError(str(error)) from error
        except BackgroundSaveError as error:
            self._failure = error.failure
            return AsyncResponse(self._wait, lambda callback: None)
        if not is_saved:
            return None
        record = self._manager.step_record(step).encoded()

        def watch(callback: Callable[[], None]) -> None:
            self._completions.add(step, record, callback)

        callback = context.asynchronous.post_finalization_callback
        if callback is not None:
            watch(callback)
        return AsyncResponse(self._wait, watch)

    def _wait(self, timeout: float | None) -> bool:
        self._manager.wait_until_finished(timeout_secs=timeout)
        self._completions.call_due()
        self._raise_failure()
        return True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # Loading.

    def load(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = STATE,
    ) -> Any:
        """Return the pytree saved at `step`, or at the newest step.

        Args:
            step: The step, or one of `checkpoints`.
            abstract_state: Shapes, dtypes, shardings and types; None loads it as it was saved.
            checkpointable_name: The name under which it was saved. `state` is `pytree` in
                checkpoints of Orbax before 0.12.

        Raises:
            CheckpointNotFoundError: A `FileNotFoundError`: there is no such checkpoint.
            ItemNotFoundError: A `KeyError`: nothing was saved under this name.
            StructureMismatchError: A `ValueError`: it is not as wanted.
        """
        trees.check_abstract(abstract_state)
        number = self._step(step)
        name = item_args.name_in(self._manager.step_record(number), checkpointable_name)
        return self.load_checkpointables(number, {name: abstract_state})[name]

    def load_checkpointables(
        self, step: int | CheckpointMetadata | None = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        """Return checkpointables by name: those asked for, or all as they were saved.

        Raises:
            CheckpointNotFoundError, ItemNotFoundError, StructureMismatchError: As `load`.
        """
        context = current(self._context)
        number = self._step(step)
        targets = item_args.targets_of(abstract_checkpointables)
        arguments = item_args.restore_args(self._manager.step_record(number), targets, context)
        return self._manager.restore_items(number, arguments)

    def load_async(self, *args: Any, **options: Any) -> AsyncResponse:
        """Load as `load` does, which has ended when this returns."""
        return completed(self.load(*args, **options))

    def load_checkpointables_async(self, *args: Any, **options: Any) -> AsyncResponse:
        """Load as `load_checkpointables` does, which has ended when this returns."""
        return completed(self.load_checkpointables(*args, **options))

    # What there is.

    def metadata(
        self,
        step: int | CheckpointMetadata | None = None,
        checkpointable_name: str = STATE,
    ) -> CheckpointMetadata:
        """Return the metadata of the pytree of a step, or of the newest step."""
        number = self._step(step)
        overview = self.checkpointables_metadata(number)
        name = item_args.name_in(self._manager.step_record(number), checkpointable_name)
        return dataclasses.replace(overview, metadata=overview.metadata.get(name))

    def checkpointables_metadata(
        self, step: int | CheckpointMetadata | None = None
    ) -> CheckpointMetadata:
        """Return the metadata of all checkpointables of a step, or of the newest step."""
        number = self._step(step)
        record = self._manager.step_record(number)
        nsecs = int(record.time.timestamp() * 1e9)
        return CheckpointMetadata(
            step=number,
            path=build_step_path(self._directory, self._names, number),
            metadata=item_args.abstract_items(
                record,
                lambda name: self._manager.item_files(number, name),
                current(self._context),
            ),
            metrics=record.metrics,
            init_timestamp_nsecs=nsecs,
            commit_timestamp_nsecs=nsecs,
            custom_metadata=record.custom_metadata or {},
        )

    def root_metadata(self) -> RootMetadata:
        """Return the metadata of the run."""
        custom_metadata = self._manager.metadata().custom_metadata
        return RootMetadata(directory=self._directory, custom_metadata=custom_metadata)

    def reload(self) -> None:
        """List the run again."""
        self._manager.reload()

    # Ending.

    def delete(
        self,
        step: int | CheckpointMetadata,
        *,
        checkpointable_name: str | None = None,
        missing_ok: bool = False,
    ) -> bool:
        """Remove a checkpoint, or one checkpointable of it; return whether it was there.

        Args:
            step: The step, or one of `checkpoints`.
            checkpointable_name: What is removed; None: all. The checkpoint is saved again without
                it, and replaced once that is durable. It must be the newest.
            missing_ok: Whether it is no error if there is nothing to remove.

        Raises:
            CheckpointNotFoundError, ItemNotFoundError: A `FileNotFoundError`: it is not there, and
                `missing_ok` is not set.
            InvalidArgumentError: A `ValueError`: it is the only checkpointable.
            StepOrderError: A `ValueError`: the step is not the newest one.
            ArgumentTypeError: A `TypeError`: the step is no int, or the name no string.
        """
        number = step.step if isinstance(step, CheckpointMetadata) else step
        if not isinstance(number, int) or isinstance(number, bool):
            raise ArgumentTypeError(f"delete: expected a step, found {step!r}")
        if number < 0:
            raise InvalidArgumentError(f"delete step {number}: expected a step from 0")
        item_args.check_deleted_name(checkpointable_name)
        try:
            if checkpointable_name is None:
                self._manager.delete(self._step(step))
            else:
                self._manager.delete_item(self._step(step), checkpointable_name)
        except (CheckpointNotFoundError, ItemNotFoundError):
            if missing_ok:
                return False
            raise
        return True

    def delete_async(self, step: int | CheckpointMetadata, **options: Any) -> AsyncResponse:
        """Remove as `delete` does, which has ended when this returns."""
        return completed(self.delete(step, **options))

    def cancel(self, step: int | CheckpointMetadata | None = None) -> None:
        """Wait for the saves in progress, and remove their checkpoints, or that of `step`."""
        self._manager.cancel(step.step if isinstance(step, CheckpointMetadata) else step)

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is not durable yet."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Wait until all saves are durable."""
        self._wait(None)

    def close(self) -> None:
        """Wait until all saves are durable, call what waits for that, and release the run."""
        try:
            self._manager.close()
        finally:
            self._completions.end()
        self._raise_failure()

    save_pytree = aliases.of_method("save_pytree", "save")
    save_pytree_async = aliases.of_method("save_pytree_async", "save_async")
    load_pytree = aliases.of_method("load_pytree", "load")
    load_pytree_async = aliases.of_method("load_pytree_async", "load_async")
    pytree_metadata = aliases.of_method("pytree_metadata", "metadata")
