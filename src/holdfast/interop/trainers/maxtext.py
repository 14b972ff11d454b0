"""MaxText: `install()` before the training, and no file of MaxText is edited.

`install` puts Holdfast in the place of the functions that create MaxText's checkpoint managers. By
environment: `PYTHONPATH=$(python -m holdfast.interop.trainers.maxtext)`, a folder with a
`sitecustomize` that calls `install` when MaxText is imported.

Invariants:
- Every step is offered to the policies, so that RAM and preemptions are served between the steps
  that MaxText saves.
- A failure of a checkpoint ends the process with status 1; MaxText's own would end it with 0.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import holdfast
from holdfast.errors import HoldfastError, InvalidArgumentError, StepNotFoundError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import checkpoint_manager as orbax_manager
from holdfast.interop.orbax import options as orbax_options
from holdfast.interop.orbax import shared_run
from holdfast.interop.orbax.checkpoint_managers import preservation_policy, save_decision_policy
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.records import StepRecord
from holdfast.interop.orbax.v1 import checkpointer as v1_checkpointer
from holdfast.interop.orbax.v1.context import Context
from holdfast.policy.save_decision_policy import FixedIntervalPolicy

MODULES = (
    "maxtext.common.checkpointing",
    "maxtext.common.emergency_checkpointing",
    "maxtext.utils.train_utils",
)
FIRST, SECOND = "CheckpointManagerOptions", "build_context"
"""What MaxText's `create_orbax_checkpoint_manager` uses, by generation: managers of Orbax's first
interface, or since its commit c41b2ae3a `training.Checkpointer` of the second one."""
NEEDED = (
    (0, "create_orbax_checkpoint_manager", "enable_continuous_checkpointing"),
    (0, "_should_save_checkpoint_at_step", "checkpoint_manager"),
    (0, "save_checkpoint", "data_iterator"),
    (2, "create_checkpoint_manager", "init_state_fn"),
)
"""Functions of MaxText in use, by the index of their module, each with one of its arguments."""
EXPECTED = "as of its commit e591f30c, or as of its release 0.2.5"
STARTUP = Path(__file__).parent / "maxtext_startup"
ITERATOR = "iter"
"""The item in which MaxText saves Grain's iterators."""

GRAIN = "grain"
"""MaxText's `dataset_type` for which checkpoints have that item."""

log = logging.getLogger(__name__)


def install() -> None:
    """Let MaxText save with Holdfast in this process. Further calls do nothing.

    Raises:
        ImportError: MaxText cannot be imported, or is of a version with another interface.
    """
    checkpointing, _, train_utils = modules = [_module(name) for name in MODULES]
    if getattr(checkpointing, "is_of_holdfast", False):
        return
    for index, name, argument in NEEDED:
        function = getattr(modules[index], name, None)
        if function is None or argument not in inspect.signature(function).parameters:
            raise ImportError(
                f"holdfast.interop.trainers.maxtext: expected MaxText {EXPECTED}, found one "
                f"without {MODULES[index]}.{name}(... {argument} ...); use such a version"
            )
    is_second = _is_second_generation(checkpointing)
    own_create, own_decides, own_preempted = (
        train_utils.create_checkpoint_manager,
        checkpointing._should_save_checkpoint_at_step,
        getattr(checkpointing, "reached_preemption", None),
    )

    def create(config: Any, mesh: Any, init_state_fn: Any) -> Any:
        if config.enable_checkpointing and config.dataset_type == GRAIN:
            _check_input(config)
        if config.enable_multi_tier_checkpointing or config.enable_emergency_checkpoint:
            created = _create_tiered(config, is_second=is_second)
        else:
            created = own_create(config, mesh, init_state_fn)
        if created is not None and config.dataset_type == GRAIN:
            manager = created.manager if isinstance(created, MaxTextCheckpointer) else created
            manager.few_load = config.expansion_factor_real_data > 1
        return created

    def decides(checkpoint_manager: Any, step: int, config: Any, force: bool) -> bool:
        if not isinstance(checkpoint_manager, MaxTextManager | MaxTextCheckpointer) or force:
            return bool(own_decides(checkpoint_manager, step, config, force))
        return step > 0 or bool(config.save_checkpoint_on_start)

    def preempted(checkpoint_manager: Any, step: int) -> bool:
        if isinstance(checkpoint_manager, MaxTextCheckpointer):
            return checkpoint_manager.reached_preemption(step)
        assert own_preempted is not None
        return bool(own_preempted(checkpoint_manager, step))

    if is_second:
        checkpointing.reached_preemption = preempted
    checkpointing.create_orbax_checkpoint_manager = functools.partial(_create, is_second=is_second)
    checkpointing._should_save_checkpoint_at_step = decides
    train_utils.create_checkpoint_manager = create
    checkpointing.is_of_holdfast = True


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"holdfast.interop.trainers.maxtext: expected MaxText {EXPECTED}, found that {name} "
            f"cannot be imported: {error}"
        ) from error


def _is_second_generation(checkpointing: Any) -> bool:
    """Return whether MaxText trains with Orbax's second interface.

    Raises:
        ImportError: It uses neither interface.
    """
    names = inspect.unwrap(checkpointing.create_orbax_checkpoint_manager).__code__.co_names
    if SECOND in names and callable(getattr(checkpointing, "reached_preemption", None)):
        return True
    if FIRST in names:
        return False
    raise ImportError(
        f"holdfast.interop.trainers.maxtext: expected MaxText {EXPECTED}, found one whose "
        f"create_orbax_checkpoint_manager uses neither {FIRST} nor {SECOND} with "
        "reached_preemption; use such a version"
    )


class IteratorFolders:
    """A folder with `STEP/iter` for each step, where MaxText looks for Grain's files.

    Args:
        files_of: Returns the files of the iterators of a step by their paths.
    """

    def __init__(self, files_of: Callable[[int], Mapping[str, bytes]]) -> None:
        self._files_of = files_of
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def folder(self, steps: Sequence[int]) -> Any:
        """Return the folder, with the files of all these steps."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="holdfast-maxtext-")
        folder = Path(self._folder.name)
        for step in steps:
            if not (folder / str(step)).exists():
                self._write(step, folder / str(step))
        return path_of(folder)

    def _write(self, step: int, folder: Path) -> None:
        folder.mkdir()
        try:
            files = self._files_of(step)
        except StepNotFoundError:
            return  # It was removed since it was listed.
        for name, content in files.items():
            path = folder / ITERATOR / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def remove(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class WritesNothing:
    """The handler of an item of which this process has no files."""

    def save(self, directory: Any, args: Any) -> None:
        """Write no file."""


@ocp_args.register_with_handler(WritesNothing, for_save=True)
class NoFiles(ocp_args.CheckpointArgs):
    """Arguments of an item of which this process has no files, but another one has."""


class MaxTextManager(orbax_manager.CheckpointManager):
    """The manager that MaxText's trainer calls.

    Attributes:
        few_load: Whether only some processes load data by Grain (`expansion_factor_real_data` above
            1). MaxText saves no iterator on the others; here all processes save the same items.

    Args:
        directory: MaxText's checkpoint directory; the run is in its folder `holdfast`.
        options: Options of Orbax's manager.
        ram: The tier in the host's memory.
    """

    def __init__(self, directory: str, options: Any, ram: holdfast.RamTier) -> None:
        self._ram = ram
        self._iterators = IteratorFolders(lambda step: self.item_files(step, ITERATOR))
        self.few_load = False
        super().__init__(directory, options=options)

    def _save_args(self, items: Any, save_kwargs: Any, args: Any) -> dict[str, Any]:
        arguments = super()._save_args(items, save_kwargs, args)
        return {ITERATOR: NoFiles(), **arguments} if self.few_load else arguments

    def _state(
        self, given: Mapping[str, Any], metrics: Any, custom: Any
    ) -> tuple[dict[str, Any], StepRecord]:
        state, record = super()._state(given, metrics, custom)
        if self.few_load:
            # Trap: MaxText writes `process_0-of-1.0.json`, and looks for `process_0-of-1.json`.
            iterators = state[ITERATOR]
            iterators.files = {
                name.replace(".0.json", ".json"): data for name, data in iterators.files.items()
            }
        return state, record

    def _opened(self) -> shared_run.SharedRun:
        if self._run is None:
            options = {"ram": self._ram}
            self._run = shared_run.acquire(self._reader.directory, self, lambda: options)
        return self._run

    @property
    def directory(self) -> Any:
        """A folder with `STEP/iter` for each step, where MaxText looks for Grain's files."""
        return self._iterators.folder(self.all_steps())

    def save(self, step: int, *arguments: Any, **named: Any) -> bool:
        """Save as Orbax's manager does.

        Raises:
            SystemExit: The checkpoint failed; the process ends with status 1.
        """
        return bool(_ending(super().save, step, *arguments, **named))

    def restore(self, step: int | None, *arguments: Any, **named: Any) -> Any:
        """Restore as Orbax's manager does, and remove the folder of `directory`.

        Raises:
            SystemExit: The checkpoint cannot be read; the process ends with status 1.
        """
        try:
            return _ending(super().restore, step, *arguments, **named)
        finally:
            self._iterators.remove()

    def wait_until_finished(self, **named: Any) -> None:
        """Wait as Orbax's manager does.

        Raises:
            SystemExit: A save failed; the process ends with status 1.
        """
        _ending(super().wait_until_finished, **named)


class MaxTextCheckpointer(v1_checkpointer.Checkpointer):
    """The `training.Checkpointer` that MaxText's trainer calls since its second generation.

    MaxText checks the class. Orbax's is final, and abstract, so this one is registered with it.

    Args:
        directory: MaxText's checkpoint directory; the run is in its folder `holdfast`.
        context: Options of Orbax's second interface.
        ram: The tier in the host's memory.
        policies: When to save and what is kept.
    """

    use_async = True
    """Whether MaxText saves in the background."""
    _manager: MaxTextManager

    def __init__(
        self, directory: str, context: Any, ram: holdfast.RamTier, **policies: Any
    ) -> None:
        self._ram = ram
        self._iterators = IteratorFolders(lambda step: self._manager.item_files(step, ITERATOR))
        orbax = sys.modules.get("orbax.checkpoint.experimental.v1")
        if orbax is not None:
            orbax.training.Checkpointer.register(type(self))
        super().__init__(directory, context=context, **policies)

    def _make_manager(self, directory: Any, **arguments: Any) -> orbax_manager.CheckpointManager:
        del arguments["metadata"], arguments["logger"]
        return MaxTextManager(directory, ram=self._ram, **arguments)

    @property
    def manager(self) -> MaxTextManager:
        """The manager below."""
        return self._manager

    @property
    def directory(self) -> Any:
        """A folder with `STEP/iter` for each step, where MaxText looks for Grain's files."""
        return self._iterators.folder(self._manager.all_steps())

    def reached_preemption(self, step: int) -> bool:
        """Return whether a preemption was announced and `step`, or an earlier one, is its last."""
        return self._manager.reached_preemption(step)

    def load_checkpointables(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Load as Orbax's does, and remove the folder of `directory`.

        Raises:
            SystemExit: The checkpoint cannot be read; the process ends with status 1.
        """
        try:
            loaded: dict[str, Any] = _ending(super().load_checkpointables, *arguments, **named)
        finally:
            self._iterators.remove()
        return loaded


def _ending(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call; for an error, end the process: MaxText catches other exceptions and ends with 0."""
    try:
        return call(*arguments, **named)
    except FileExistsError:
        # The step is there. MaxText goes on.
        raise
    except HoldfastError as error:
        raise SystemExit(f"holdfast: the training ends: {error}") from error


def _create(
    checkpoint_dir: str,
    enable_checkpointing: bool,
    use_async: bool,
    save_interval_steps: int,
    dataset_type: str | None = None,
    orbax_logger: Any = None,
    use_ocdbt: bool = True,
    use_zarr3: bool = True,
    enable_continuous_checkpointing: bool = False,
    max_num_checkpoints_to_keep: int = 10,
    checkpoint_storage_concurrent_gb: int = 96,
    enable_autocheckpoint: bool = False,
    todelete_subdir: str | None = None,
    todelete_full_path: str | None = None,
    ocdbt_target_data_file_size_bytes: int | None = None,
    *,
    is_second: bool = False,
) -> Any:
    """Return a manager for MaxText's arguments; those about Orbax's files have no effect."""
    del dataset_type, orbax_logger, use_ocdbt, use_zarr3, checkpoint_storage_concurrent_gb
    del ocdbt_target_data_file_size_bytes
    del enable_autocheckpoint  # A preemption is always answered.
    if not enable_checkpointing:
        return None
    decides: Any = save_decision_policy.FixedIntervalPolicy(save_interval_steps)
    if enable_continuous_checkpointing:
        decides = save_decision_policy.ContinuousCheckpointingPolicy()
    for name, value in (
        ("checkpoint_todelete_subdir", todelete_subdir),
        ("checkpoint_todelete_full_path", todelete_full_path),
    ):
        if value:
            _refuse(name, value)
    keeps = preservation_policy.LatestN(max_num_checkpoints_to_keep)
    if is_second:
        manager = _checkpointer(checkpoint_dir, holdfast.RamTier(), decides, keeps)
        manager.use_async = use_async
        return manager
    return MaxTextManager(
        checkpoint_dir,
        orbax_options.CheckpointManagerOptions(
            enable_async_checkpointing=use_async,
            save_decision_policy=decides,
            preservation_policy=keeps,
        ),
        holdfast.RamTier(),
    )


def _create_tiered(config: Any, *, is_second: bool) -> Any:
    """Return a manager for the emergency and the multi-tier flags: RAM, and the directory."""
    log.info(
        "checkpoints in memory are in Holdfast's RAM tier (HOLDFAST_RAM); "
        "local_checkpoint_directory is not used"
    )
    decides = save_decision_policy.FixedIntervalPolicy(config.checkpoint_period)
    keeps = preservation_policy.LatestN(config.max_num_checkpoints_to_keep)
    ram = holdfast.RamTier(save_decision_policy=FixedIntervalPolicy(config.local_checkpoint_period))
    if is_second:
        manager = _checkpointer(config.checkpoint_dir, ram, decides, keeps)
        manager.use_async = True
        return manager
    options = orbax_options.CheckpointManagerOptions(
        save_decision_policy=decides, preservation_policy=keeps
    )
    return MaxTextManager(config.checkpoint_dir, options, ram)


def _checkpointer(
    directory: str, ram: holdfast.RamTier, decides: Any, keeps: Any
) -> MaxTextCheckpointer:
    """Return the checkpointer of the second generation, which loads parts of trees."""
    context = Context()
    context.pytree.loading.partial_load = True
    return MaxTextCheckpointer(
        directory, context, ram, save_decision_policy=decides, preservation_policy=keeps
    )


def _check_input(config: Any) -> None:
    if config.colocated_python_data_input:
        raise InvalidArgumentError(
            "colocated_python_data_input: the workers write Grain's iterators to checkpoint_dir by "
            "themselves, so that no commit of Holdfast has them; expected false, found true"
        )


def _refuse(name: str, found: object) -> NoReturn:
    raise InvalidArgumentError(
        f"{name}: Holdfast deletes checkpoints by itself; expected no value, found {found!r}"
    )


if __name__ == "__main__":
    print(os.fspath(STARTUP))
