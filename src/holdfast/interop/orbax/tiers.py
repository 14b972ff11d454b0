"""Define Orbax's emergency, multi-tier and P2P managers, on a run with a tier in RAM.

Orbax's managers write to a file system in each host's memory and copy from host to host. Holdfast's
agents do that: the local options become a `RamTier`, and the persistent ones the durable tier. So
`local_directory` is not used, one slice is enough, and all items are in both tiers, also iterators.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast import RamTier
from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import shared_run
from holdfast.interop.orbax.checkpoint_manager import CheckpointManager
from holdfast.interop.orbax.checkpoint_managers import preservation_policy as preservation
from holdfast.interop.orbax.checkpoint_managers import save_decision_policy as decisions
from holdfast.interop.orbax.options import CheckpointManagerOptions
from holdfast.interop.orbax.restore_args import restore_args_as_placed
from holdfast.policy import preservation_policy as own_preservation
from holdfast.policy import save_decision_policy as own_decisions

STATE = "state"
DATASET = "dataset"
DATA_ITER = "data_iter"


@dataclasses.dataclass
class RamOptions:
    """When to save to RAM, and how many checkpoints stay there."""

    save_interval_steps: int = 10
    max_to_keep: int | None = None
    read_only: bool = False
    should_save_fn: Any = None
    save_decision_policy: Any = None
    preservation_policy: Any = None
    debug_use_full_global_mesh: bool = False

    def __post_init__(self) -> None:
        _check_keeping("LocalCheckpointOptions", self.preservation_policy, self.max_to_keep)
        if self.preservation_policy is None and self.max_to_keep is None:
            self.max_to_keep = 1


@dataclasses.dataclass
class DurableOptions:
    """When to save to the durable directory, and which checkpoints stay there."""

    save_interval_steps: int = 1000
    max_to_keep: int | None = None
    keep_period: int | None = None
    should_save_fn: Callable[[int, int | None], bool] | None = None
    save_decision_policy: Any = None
    preservation_policy: Any = None

    def __post_init__(self) -> None:
        _check_keeping(
            "PersistentCheckpointOptions",
            self.preservation_policy,
            self.max_to_keep if self.max_to_keep is not None else self.keep_period,
        )


def _check_keeping(options: str, policy: Any, other: Any) -> None:
    if policy is not None and other is not None:
        raise InvalidArgumentError(
            f"{options}(preservation_policy=...): expected no max_to_keep and no keep_period "
            "beside it, found both"
        )


@dataclasses.dataclass
class CoordinationOptions:
    """Taken for compatibility: Holdfast's agents have timeouts of their own."""

    coordination_timeout_secs: int = 120


@dataclasses.dataclass
class EmergencyOptions:
    """The options of `EmergencyCheckpointManager`."""

    local: Any = dataclasses.field(default_factory=RamOptions)
    persistent: Any = dataclasses.field(default_factory=DurableOptions)
    replica_axis_index: int = 0
    step_name_format: Any = None
    cleanup_tmp_directories: bool = False
    enable_async_checkpointing: bool = True
    async_options: Any = None
    multiprocessing_options: Any = None
    single_host_load_and_broadcast: bool = True


@dataclasses.dataclass
class ReplicatorCheckpointManagerOptions:
    """The options of `ReplicatorCheckpointManager`."""

    save_interval_steps: int = 1
    step_name_format: Any = None
    should_save_fn: Callable[[int, int | None], bool] | None = None
    preservation_policy: Any = None
    use_colocated_python: bool = False
    enable_async_checkpointing: bool = True
    save_concurrent_gb: int | None = None
    restore_concurrent_gb: int | None = None


@dataclasses.dataclass
class PeerRamOptions:
    """When a P2P manager saves to RAM, and how many checkpoints stay there."""

    save_interval_steps: int = 10
    save_interval_offset_steps: int = 0
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        self.max_to_keep = 1 if self.max_to_keep is None else self.max_to_keep


@dataclasses.dataclass
class PeerDurableOptions:
    """When a P2P manager saves to the durable directory, and how many checkpoints stay there."""

    save_interval_steps: int = 1000
    save_interval_offset_steps: int = 0
    max_to_keep: int | None = None


@dataclasses.dataclass
class PeerOptions:
    """The options of `PeerCheckpointManager`."""

    local: Any = dataclasses.field(default_factory=PeerRamOptions)
    persistent: Any = dataclasses.field(default_factory=PeerDurableOptions)
    replica_axis_index: int = 0
    step_name_format: Any = None


class TieredCheckpointManager(CheckpointManager):
    """A manager whose run has saves for RAM alone beside the durable ones.

    Args:
        directory: The durable directory, which all hosts share.
        options: The options of the durable tier.
        ram_decides: The policy, of Orbax's kind, that saves to RAM; None: each save is durable.
        ram: The tier in RAM.
        more: Further arguments of `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        options: CheckpointManagerOptions,
        ram_decides: Any,
        ram: RamTier,
        **more: Any,
    ) -> None:
        self._ram_decides, self._ram = ram_decides, ram
        super().__init__(directory, options=options, **more)

    def _run_options(self) -> Mapping[str, Any]:
        return {"ram": self._ram}

    def _is_due_in_ram(self, step: int) -> bool:
        steps = self.all_steps()
        if self._ram_decides is None or (steps and steps[-1] >= step):
            return False
        return bool(self._ask(self._ram_decides, step))

    def should_save(self, step: int) -> bool:
        """Return whether a policy saves `step`, to RAM or to the durable directory."""
        return super().should_save(step) or self._is_due_in_ram(step)

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return the steps that can be restored from any tier, ascending."""
        if read:
            self.reload()
        return self._reader.saved_steps()

    def latest_step(self) -> int | None:
        """Return the newest step that can be restored from any tier; None if there is none."""
        return max(self.all_steps(), default=None)


class EmergencyCheckpointManager(TieredCheckpointManager):
    """Save often to RAM and more rarely to storage, by the calls of Orbax's emergency manager.

    Args:
        local_directory: Not used: the host's agent owns the RAM.
        persistent_directory: The durable directory, which all hosts share.
        global_mesh: Taken for compatibility: replicas are found by the shardings of the arrays.
        abstract_state: Shapes, dtypes and shardings of the state to restore.
        options: See `EmergencyOptions`; Orbax's are taken too.
        metadata: JSON about the run.
        logger: Taken for compatibility.
        item_handlers: Taken for compatibility: items are restored by their arguments.
        handler_registry: Taken for compatibility.
        persistent_non_replicated_directory: Not used: iterators are in the same checkpoint.

    Raises:
        InvalidArgumentError: An option cannot be honoured; the message names it.
    """

    def __init__(
        self,
        local_directory: str | os.PathLike[str],
        persistent_directory: str | os.PathLike[str],
        global_mesh: Any,
        abstract_state: Any,
        *,
        options: Any = None,
        metadata: Mapping[str, Any] | None = None,
        logger: Any = None,
        item_handlers: Any = None,
        handler_registry: Any = None,
        persistent_non_replicated_directory: Any = None,
    ) -> None:
        del local_directory, global_mesh, logger, item_handlers, handler_registry
        del persistent_non_replicated_directory
        with shared_run.opening(persistent_directory):
            settings = options or EmergencyOptions()
            local, persistent = settings.local, settings.persistent
            tier = _ram_tier(local)
            durable = CheckpointManagerOptions(
                save_interval_steps=persistent.save_interval_steps,
                max_to_keep=persistent.max_to_keep,
                keep_period=persistent.keep_period,
                should_save_fn=persistent.should_save_fn,
                save_decision_policy=persistent.save_decision_policy,
                preservation_policy=persistent.preservation_policy,
                step_name_format=settings.step_name_format,
                single_host_load_and_broadcast=_broadcasts(settings.step_name_format),
                cleanup_tmp_directories=settings.cleanup_tmp_directories,
                enable_async_checkpointing=settings.enable_async_checkpointing,
                async_options=settings.async_options,
            )
        self._abstract_state = abstract_state
        super().__init__(persistent_directory, durable, *tier, metadata=metadata)

    def save(  # type: ignore[override]
        self,
        step: int,
        args: Any,
        *,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save items, a `Composite` with `state` and perhaps `dataset`, if a policy saves `step`.

        Returns:
            Whether the step is being saved, to RAM or to the durable directory.
        """
        _check_items(args, "save", (STATE, DATASET))
        return super().save(step, args=args, force=force, custom_metadata=custom_metadata)

    def restore(self, step: int | None, args: Any = None) -> Any:  # type: ignore[override]
        """Restore the state, like `abstract_state`, and the `dataset` if `args` has it."""
        like = restore_args_as_placed(self._abstract_state)
        arguments = {STATE: ocp_args.PyTreeRestore(self._abstract_state, restore_args=like)}
        if args is not None and DATASET in args:
            arguments[DATASET] = args[DATASET]
        return super().restore(step, args=ocp_args.Composite(**arguments))


class ReplicatorCheckpointManager(TieredCheckpointManager):
    """Save to RAM, and to storage as fast as that is, by the calls of Orbax's multi-tier manager.

    Args:
        local_directory: Not used if there is a `persistent_directory`; else the durable directory.
        options: See `ReplicatorCheckpointManagerOptions`; Orbax's are taken too.
        global_mesh: Taken for compatibility: replicas are found by the shardings of the arrays.
        persistent_directory: The durable directory, which all hosts share.
        handler_registry: Taken for compatibility: items are restored by their arguments.

    Raises:
        InvalidArgumentError: An option cannot be honoured; the message names it.
    """

    def __init__(
        self,
        local_directory: str | os.PathLike[str],
        options: Any = None,
        *,
        global_mesh: Any = None,
        persistent_directory: str | os.PathLike[str] | None = None,
        handler_registry: Any = None,
    ) -> None:
        del global_mesh, handler_registry
        directory = persistent_directory or local_directory
        with shared_run.opening(directory):
            settings = options or ReplicatorCheckpointManagerOptions()
            if settings.use_colocated_python:
                raise InvalidArgumentError(
                    "ReplicatorCheckpointManagerOptions(use_colocated_python=...): not supported: "
                    "Holdfast runs in each process of a job; leave it out"
                )
            durable = CheckpointManagerOptions(
                save_decision_policy=decisions.ContinuousCheckpointingPolicy(),
                preservation_policy=settings.preservation_policy or preservation.LatestN(1),
                step_name_format=settings.step_name_format,
                single_host_load_and_broadcast=_broadcasts(settings.step_name_format),
                enable_async_checkpointing=settings.enable_async_checkpointing,
            )
            local = RamOptions(settings.save_interval_steps, should_save_fn=settings.should_save_fn)
            tier = _ram_tier(local)
        super().__init__(directory, durable, *tier)

    def _is_due(self, step: int) -> bool:
        # A step that RAM does not save is not saved to storage either.
        return self._is_due_in_ram(step) and super()._is_due(step)

    def save(  # type: ignore[override]
        self,
        step: int,
        args: Any,
        *,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save items, a `Composite` with `state`, at each interval.

        Returns:
            Whether the step is being saved.
        """
        _check_items(args, "save", None)
        return super().save(step, args=args, force=force, custom_metadata=custom_metadata)

    def restore(self, step: int | None, args: Any = None) -> Any:  # type: ignore[override]
        """Restore items as `args` say; without it as they were saved."""
        return super().restore(step, args=args)


class PeerCheckpointManager(TieredCheckpointManager):
    """Save to RAM and copy to other hosts, by the calls of Orbax's P2P manager.

    Args:
        global_mesh: Taken for compatibility: replicas are found by the shardings of the arrays.
        abstract_state: Taken for compatibility: `restore` has arguments.
        local_directory: Not used: the host's agent owns the RAM.
        persistent_directory: The durable directory, which all hosts share.
        options: See `PeerOptions`; Orbax's are taken too.

    Raises:
        InvalidArgumentError: There is no durable directory, or an option cannot be honoured.
    """

    def __init__(
        self,
        global_mesh: Any,
        abstract_state: Any,
        local_directory: str | os.PathLike[str],
        persistent_directory: str | os.PathLike[str] | None = None,
        *,
        options: Any = None,
    ) -> None:
        del global_mesh, abstract_state
        with shared_run.opening(persistent_directory or local_directory):
            if persistent_directory is None:
                raise InvalidArgumentError(
                    "p2p.CheckpointManager(persistent_directory=None): expected a directory that "
                    "all hosts share; the run has its records there"
                )
            settings = options or PeerOptions()
            if settings.local.save_interval_offset_steps:
                raise InvalidArgumentError(
                    "LocalCheckpointOptions(save_interval_offset_steps=...): not supported: "
                    f"expected 0, found {settings.local.save_interval_offset_steps}"
                )
            interval = settings.persistent.save_interval_steps
            offset = settings.persistent.save_interval_offset_steps
            tier = _ram_tier(
                RamOptions(settings.local.save_interval_steps, settings.local.max_to_keep)
            )
            durable = CheckpointManagerOptions(
                should_save_fn=lambda step, _: step >= offset and (step - offset) % interval == 0,
                max_to_keep=settings.persistent.max_to_keep,
                step_name_format=settings.step_name_format,
                single_host_load_and_broadcast=_broadcasts(settings.step_name_format),
            )
        super().__init__(persistent_directory, durable, *tier)

    def save(  # type: ignore[override]
        self,
        step: int,
        args: Any,
        *,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save items, a `Composite` with `state` and perhaps `data_iter`.

        Returns:
            Whether the step is being saved, to RAM or to the durable directory.
        """
        _check_items(args, "save", (STATE, DATA_ITER))
        return super().save(step, args=args, force=force, custom_metadata=custom_metadata)

    def restore(self, step: int | None, args: Any) -> Any:  # type: ignore[override]
        """Restore items as `args` say."""
        _check_items(args, "restore", (STATE, DATA_ITER))
        return super().restore(step, args=args)


def _ram_tier(local: Any) -> tuple[Any, RamTier]:
    """Return the policy that saves to RAM, and the tier."""
    if local.debug_use_full_global_mesh:
        raise InvalidArgumentError(
            "LocalCheckpointOptions(debug_use_full_global_mesh=...): not supported; leave it out"
        )
    keeps = local.preservation_policy or preservation.LatestN(local.max_to_keep)
    kept = getattr(keeps, "n", None)
    if type(keeps).__name__ != "LatestN":
        raise InvalidArgumentError(
            "LocalCheckpointOptions(preservation_policy=...): expected LatestN, because the "
            f"agent decides what stays in RAM, found {type(keeps).__name__}"
        )
    if local.read_only:
        return None, RamTier()
    if local.should_save_fn is not None:
        raise InvalidArgumentError(
            "should_save_fn: not supported for saves to RAM, which a policy decides: set "
            "save_interval_steps or save_decision_policy"
        )
    decides = local.save_decision_policy or decisions.FixedIntervalPolicy(local.save_interval_steps)
    tier = RamTier(
        save_decision_policy=_own_policy(decides),
        preservation_policy=own_preservation.LatestN(max(1, kept or 1)),
    )
    return decides, tier


def _own_policy(policy: Any) -> Any:
    """Return Holdfast's policy for one of Orbax's kind, which the agents can evaluate."""
    match type(policy).__name__:
        case "FixedIntervalPolicy":
            return own_decisions.FixedIntervalPolicy(policy.interval)
        case "SpecificStepsPolicy":
            return own_decisions.SpecificStepsPolicy(sorted(policy.steps))
        case "PreemptionCheckpointingPolicy":
            return own_decisions.PreemptionCheckpointingPolicy()
        case "AnySavePolicy":
            members = [
                member for member in policy.policies if type(member).__name__ != "InitialSavePolicy"
            ]
            return own_decisions.AnySavePolicy([_own_policy(member) for member in members])
    raise InvalidArgumentError(
        "LocalCheckpointOptions(save_decision_policy=...): expected FixedIntervalPolicy, "
        "SpecificStepsPolicy, PreemptionCheckpointingPolicy or AnySavePolicy of them, found "
        f"{type(policy).__name__}"
    )


def _broadcasts(name_format: Any) -> bool:
    return bool(getattr(name_format, "single_host_load_and_broadcast", False))


def _check_items(args: Any, call: str, names: tuple[str, ...] | None) -> None:
    """Check that the arguments are a `Composite` with `state`, and no other items than `names`."""
    is_composite = isinstance(ocp_args.checked(args, call), ocp_args.Composite)
    if not is_composite or STATE not in args:
        names_text = ", ".join(args) if is_composite else type(args).__name__
        raise InvalidArgumentError(
            f"{call}: expected a Composite with the item {STATE!r}, found {names_text or 'nothing'}"
        )
    unknown = [name for name in args if names is not None and name not in names]
    if unknown:
        raise InvalidArgumentError(
            f"{call}: expected the items {', '.join(names or ())}, found {unknown[0]!r}"
        )
