"""Define the options of `Context`, by the groups and fields of Orbax's second interface.

Each field is honoured, refused by name when a call uses the context (`check`), or without an effect
here: what is said of Orbax's files, chunks and requests. Options that were set without an effect
are logged.
"""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.v1 import registry as registries
from holdfast.interop.orbax.v1.errors import FrozenContextError

log = logging.getLogger(__name__)

frozen_ids: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "holdfast_orbax_frozen_options", default=frozenset()
)
"""The ids of the contexts whose `with` blocks this thread is in, and of their options."""


class OptionGroup:
    """The base class of groups: other fields are refused, and all of them in a `with` block."""

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__qualname__
        if id(self) in frozen_ids.get():
            raise FrozenContextError(
                f"{kind}.{name}: the context of this option is in use; set its options before the "
                "with block"
            )
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        if name not in names:
            raise InvalidArgumentError(
                f"{kind}.{name}: not supported; there are {', '.join(names)}"
            )
        object.__setattr__(self, name, value)


class AtomicityMode(enum.StrEnum):
    """How Orbax makes a checkpoint visible. Here the manifest does, on every storage."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


class CheckpointLayout(enum.Enum):
    """What is loaded: checkpoints of Holdfast and Orbax, safetensors files, or either."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"


@dataclasses.dataclass(kw_only=True)
class AsyncOptions(OptionGroup):
    """How saves run in the background."""

    timeout_secs: int = 1200
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclasses.dataclass(kw_only=True)
class AtomicityOptions(OptionGroup):
    """Without an effect: a checkpoint is visible whole, or not at all."""

    mode: Any = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


@dataclasses.dataclass(kw_only=True)
class MultiprocessingOptions(OptionGroup):
    """Which processes take part: all, with process 0 as the primary one."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass(kw_only=True)
class FileOptions(OptionGroup):
    """How files are made; `path_class` makes the paths that are returned, None: those of etils."""

    path_permission_mode: int | None = None
    path_class: Any = None
    skip_sync_file_validations: bool = False


@dataclasses.dataclass(kw_only=True)
class PyTreeOptions(OptionGroup):
    """How trees are saved and loaded."""

    @dataclasses.dataclass(kw_only=True)
    class Saving(OptionGroup):
        """How trees are saved."""

        pytree_metadata_options: Any = None

    @dataclasses.dataclass(kw_only=True)
    class Loading(OptionGroup):
        """How trees are loaded: with `partial_load`, just the leaves that are asked for."""

        partial_load: bool = False

    saving: Saving = dataclasses.field(default_factory=Saving)
    loading: Loading = dataclasses.field(default_factory=Loading)


@dataclasses.dataclass(kw_only=True)
class ArrayOptions(OptionGroup):
    """How arrays are saved and loaded."""

    @dataclasses.dataclass(kw_only=True)
    class Saving(OptionGroup):
        """How arrays are saved; `storage_options.dtype` is honoured, of each leaf or of all."""

        @dataclasses.dataclass(kw_only=True)
        class StorageOptions(OptionGroup):
            """How one array is saved: `dtype` converts it; the others are about chunks."""

            dtype: Any = None
            chunk_byte_size: int | None = None
            shard_axes: tuple[int, ...] | None = None

        storage_options: StorageOptions = dataclasses.field(default_factory=StorageOptions)
        use_ocdbt: bool = True
        use_zarr3: bool = True
        use_compression: bool = True
        ocdbt_target_data_file_size: int | None = None
        enable_pinned_host_transfer: bool | None = None
        enable_post_merge_validation: bool = True
        use_replica_parallel: bool | None = None
        min_slice_bytes_for_replica_parallel: int | None = None
        max_replicas_for_replica_parallel: int | None = None
        enable_replica_parallel_separate_folder: bool = False
        enable_write_sharding_file: bool = True
        array_metadata_store: Any = None
        scoped_storage_options_creator: Callable[[Any, Any], Any] | None = None

    @dataclasses.dataclass(kw_only=True)
    class Loading(OptionGroup):
        """How arrays are loaded: cut or padded to the shapes asked for, or not."""

        @dataclasses.dataclass(kw_only=True)
        class LoadAndBroadcastOptions(OptionGroup):
            """Without an effect: processes share what they read from a bucket anyway."""

            replica_axis_index: int | None = 0
            primary_replica_id: int | None = 0
            broadcast_memory_limit_bytes: int | None = None
            broadcast_memory_scaling_factor: float | None = 0.75

        enable_padding_and_truncation: bool = False
        raise_array_data_missing_error: bool = True
        use_load_and_broadcast: bool = False
        load_and_broadcast_options: LoadAndBroadcastOptions = dataclasses.field(
            default_factory=LoadAndBroadcastOptions
        )

    saving: Saving = dataclasses.field(default_factory=Saving)
    loading: Loading = dataclasses.field(default_factory=Loading)


@dataclasses.dataclass(kw_only=True)
class CheckpointablesOptions(OptionGroup):
    """Which handlers save and load checkpointables."""

    registry: Any = dataclasses.field(
        default_factory=lambda: registries.ReadOnlyRegistry(registries.local_registry())
    )


@dataclasses.dataclass(kw_only=True)
class PathwaysOptions(OptionGroup):
    """Refused, if it is set, but for the value that turns Pathways off: it is not supported."""

    checkpointing_impl: Any = None


@dataclasses.dataclass(kw_only=True)
class DeletionOptions(OptionGroup):
    """Without an effect in a training: the agent deletes, and no call waits for it."""

    @dataclasses.dataclass(kw_only=True)
    class GcsDeletionOptions(OptionGroup):
        """Where Orbax puts aside what it would delete from a bucket."""

        todelete_full_path: str | None = None

    gcs_deletion_options: GcsDeletionOptions = dataclasses.field(default_factory=GcsDeletionOptions)


@dataclasses.dataclass(kw_only=True)
class MemoryOptions(OptionGroup):
    """Limits of the memory that Orbax needs besides the state; a slot of Holdfast needs no more."""

    write_concurrent_bytes: int | None = None
    read_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None
    regulator_options: Any = None
    expected_surge_bytes: int | float | None = None
    is_prioritized_key_fn: Callable[[Any], bool] | None = None
    serialization_status_callback: Any = None
    deepcopy_host_arrays: bool = True


@dataclasses.dataclass(kw_only=True)
class SafetensorsOptions(OptionGroup):
    """Without an effect: how Orbax divides its requests to a bucket."""

    max_over_read_ratio: float | None = None
    read_chunk_bytes: int | None = None


HONOURED = {
    "asynchronous.timeout_secs",
    "asynchronous.post_finalization_callback",
    "multiprocessing.barrier_sync_key_prefix",
    "file.path_class",
    "pytree.loading.partial_load",
    "array.saving.storage_options.dtype",
    "array.saving.scoped_storage_options_creator",
    "array.loading.enable_padding_and_truncation",
    "checkpointables.registry",
}
"""The options that have their effect. Those in neither table have none, and are logged."""

REFUSED: dict[str, str] = {
    "multiprocessing.primary_host": "all processes of a job save together, with primary host 0",
    "multiprocessing.active_processes": "all processes of a job save together",
    "file.path_permission_mode": "set the umask of the process",
    "pathways.checkpointing_impl": "use JAX without Pathways",
    "memory.is_prioritized_key_fn": "a save copies all values as they are when it is called",
    "memory.serialization_status_callback": "there is no call for each array; use on_complete of "
    "the response",
    "memory.regulator_options": "a save needs the memory of its slot and no more",
}
"""The options that would promise what does not happen, with what to do instead."""


def changed(context: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of a context that are not as by default, by their paths."""
    for name, group in context.groups.items():
        yield from _changed(name, group, type(group)())


def _changed(path: str, group: Any, defaults: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(group):
        value, default = getattr(group, field.name), getattr(defaults, field.name)
        place = f"{path}.{field.name}"
        if isinstance(value, OptionGroup):
            yield from _changed(place, value, default)
        elif value is not default and value != default:
            yield place, value


def check(context: Any) -> None:
    """Check that each option of a context can be honoured.

    Raises:
        InvalidArgumentError: One cannot.
    """
    unused = []
    for place, value in changed(context):
        if place == "pytree.saving.pytree_metadata_options":
            if getattr(value, "support_rich_types", False):
                raise InvalidArgumentError(
                    f"Context.{place}: support_rich_types is not supported; give the tree to load"
                )
        elif place in REFUSED and getattr(value, "name", None) != "NO_DISPATCHER":
            raise InvalidArgumentError(
                f"Context.{place}: not supported: {REFUSED[place]}; leave it out"
            )
        elif place not in HONOURED:
            unused.append(place)
    if unused:
        log.info("options without an effect on Holdfast's files: %s", ", ".join(unused))


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.options")
