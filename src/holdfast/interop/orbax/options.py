"""Define the options of a manager, with the fields and defaults of Orbax.

Each field is honoured, or refused by name when a manager is made. Those that say how Orbax
writes its files have no meaning for Holdfast: they are refused if they would change what a program
can see, and else listed in `FULFILLED`, and logged.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import missing_names, step
from holdfast.interop.orbax.checkpoint_managers import preservation_policy as preservation
from holdfast.interop.orbax.checkpoint_managers import save_decision_policy as decisions

log = logging.getLogger(__name__)


@dataclasses.dataclass
class AsyncOptions:
    """How saves run in the background.

    `timeout_secs` bounds each wait for them; `post_finalization_callback` is called once a save is
    durable, by the next call that waits for it.
    """

    timeout_secs: int = 1200
    barrier_sync_fn: Callable[..., None] | None = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclasses.dataclass
class MultiprocessingOptions:
    """Which processes take part: all, with process 0 as the primary one."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass
class FileOptions:
    """How files are made."""

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


@dataclasses.dataclass
class CheckpointManagerOptions:
    """The options of `CheckpointManager`; see the page on Orbax for each field."""

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: Any = None
    multiprocessing_options: Any = dataclasses.field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: Any = dataclasses.field(default_factory=FileOptions)
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: Any = None
    preservation_policy: Any = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise _invalid("best_mode", "'min' or 'max'", self.best_mode)
        if self.preservation_policy is None and (self.max_to_keep or 0) < 0:
            raise _invalid("max_to_keep", "None or an int of at least 0", self.max_to_keep)
        if self.keep_period is not None and self.keep_period < 1:
            raise _invalid("keep_period", "None or an int of at least 1", self.keep_period)
        if self.todelete_subdir is not None and self.todelete_full_path is not None:
            raise _invalid("todelete_subdir", "not both it and todelete_full_path", "both")
        broadcasts = getattr(self.step_name_format, "single_host_load_and_broadcast", None)
        if self.step_name_format and bool(broadcasts) != self.single_host_load_and_broadcast:
            raise _invalid(
                "single_host_load_and_broadcast",
                f"the value of step_name_format, {bool(broadcasts)}",
                self.single_host_load_and_broadcast,
            )
        if self.read_only:
            self._make_read_only()
        elif not _is_interval(self.save_interval_steps):
            raise _invalid("save_interval_steps", "an int of at least 1", self.save_interval_steps)
        self.save_on_steps = frozenset(self.save_on_steps or ())  # type: ignore[call-overload]

    def _make_read_only(self) -> None:
        changed = {
            "save_interval_steps": 0,
            "max_to_keep": None,
            "keep_time_interval": None,
            "keep_period": None,
            "create": False,
            "cleanup_tmp_directories": False,
            "save_on_steps": None,
            "todelete_subdir": None,
            "todelete_full_path": None,
            "should_save_fn": None,
        }
        for name, value in changed.items():
            setattr(self, name, value)


REFUSED: dict[str, tuple[Any, str]] = {
    "atomicity_options": (None, "a checkpoint exists once its manifest does, on every storage"),
    "temporary_path_class": (None, "a checkpoint exists once its manifest does, on every storage"),
    "enable_per_process_directory_creation": (False, "each process writes to one shared directory"),
}
"""Options that are refused unless they have this value, with the reason."""

KEEPING = ("max_to_keep", "keep_period", "keep_time_interval")
"""Options that a `preservation_policy` replaces."""

FULFILLED: dict[str, Any] = {
    "cleanup_tmp_directories": False,
    "single_host_load_and_broadcast": False,
    "todelete_subdir": None,
    "todelete_full_path": None,
    "enable_background_delete": False,
    "num_deletion_threads": None,
}
"""Options about the work on files, which Holdfast does in its own way, with their defaults."""


def _is_interval(given: object) -> bool:
    return given is None or (isinstance(given, int | float | np.number) and bool(given >= 1))


def check(options: Any) -> CheckpointManagerOptions:
    """Return the options, ours or Orbax's, if each can be honoured.

    Raises:
        InvalidArgumentError: One cannot.
    """
    own = options if isinstance(options, CheckpointManagerOptions) else _of_orbax(options)
    for name, (allowed, reason) in REFUSED.items():
        if getattr(own, name) != allowed:
            raise InvalidArgumentError(
                f"CheckpointManagerOptions({name}=...): not supported: {reason}; leave it out"
            )
    doubled = [name for name in KEEPING if getattr(own, name)]
    if own.preservation_policy is not None and doubled:
        raise _invalid("preservation_policy", f"not both it and {doubled[0]}", "both")
    _check_processes(own.multiprocessing_options)
    _check_files(own)
    used = [name for name, default in FULFILLED.items() if getattr(own, name) != default]
    if used:
        log.info("options without an effect on Holdfast's files: %s", ", ".join(used))
    return own


def _of_orbax(options: Any) -> CheckpointManagerOptions:
    names = {field.name for field in dataclasses.fields(CheckpointManagerOptions)}
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        raise _invalid("...", "CheckpointManagerOptions", type(options).__name__)
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise _invalid(", ".join(unknown), "the options of Orbax 0.12.8", "others")
    is_read_only = values.get("read_only", False)
    if is_read_only:
        values.pop("save_interval_steps")
    return CheckpointManagerOptions(**values)


def _check_processes(given: Any) -> None:
    if given is None:
        return
    if given.primary_host != 0 or given.active_processes is not None:
        raise InvalidArgumentError(
            "MultiprocessingOptions: expected primary_host=0 and active_processes=None, found "
            f"primary_host={given.primary_host} and active_processes={given.active_processes}; all "
            "processes of a job save together"
        )


def _check_files(options: CheckpointManagerOptions) -> None:
    files = options.file_options
    if files is not None and getattr(files, "path_permission_mode", None) is not None:
        raise InvalidArgumentError(
            "FileOptions(path_permission_mode=...): not supported; set the umask of the process"
        )
    if options.async_options is not None and options.async_options.barrier_sync_fn is not None:
        raise InvalidArgumentError(
            "AsyncOptions(barrier_sync_fn=...): not supported; saves need no barrier"
        )


def decision_policy(options: CheckpointManagerOptions) -> Any:
    """Return the policy that decides when to save."""
    if options.save_decision_policy is not None:
        return _with_method(options.save_decision_policy, "save_decision_policy", "should_save")
    preempted = decisions.PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        return decisions.AnySavePolicy(
            [decisions.ShouldSaveFunction(options.should_save_fn), preempted]
        )
    members: list[Any] = []
    if options.save_interval_steps:
        members.append(decisions.FixedIntervalPolicy(options.save_interval_steps))
    assert options.save_on_steps is not None
    members += [decisions.SpecificStepsPolicy(options.save_on_steps), preempted]
    return decisions.AnySavePolicy([*members, decisions.InitialSavePolicy()])


def keeping_policy(options: CheckpointManagerOptions) -> Any:
    """Return the policy that decides which checkpoints are kept."""
    if options.preservation_policy is not None:
        return _with_method(options.preservation_policy, "preservation_policy", "should_preserve")
    members: list[Any] = []
    if options.keep_period is not None:
        members.append(preservation.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        secs = int(options.keep_time_interval.total_seconds())
        members.append(preservation.EveryNSeconds(secs))
    if options.best_fn is None:
        members.append(preservation.LatestN(options.max_to_keep))
    else:
        members.append(
            preservation.BestN(
                get_metric_fn=options.best_fn,
                reverse=options.best_mode == "min",
                n=options.max_to_keep,
                keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
            )
        )
    return preservation.AnyPreservationPolicy(members)


def name_format(options: CheckpointManagerOptions) -> Any:
    """Return what names the folders that Orbax wrote."""
    if options.step_name_format is not None:
        return _with_method(options.step_name_format, "step_name_format", "find_all")
    return step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )


def _with_method(policy: Any, name: str, method: str) -> Any:
    if not callable(getattr(policy, method, None)):
        raise _invalid(name, f"an object with a method {method}", type(policy).__name__)
    return policy


def _invalid(name: str, expected: str, found: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"CheckpointManagerOptions({name}=...): expected {expected}, found {found!r}"
    )


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("options")
