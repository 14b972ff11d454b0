"""Refuse the names of Orbax that are not there, with what to use instead.

The error is an `AttributeError`, so `hasattr` and `getattr` with a default work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from holdfast.errors import InvalidArgumentError

_ROOT = "holdfast.interop.orbax"
_TRANSFORMS = "restore the saved tree and change it"
_HANDLERS = "register the arguments of your own handler with args.register_with_handler"
_PROTO = "save its SerializeToString() as a leaf of a tree"
_FOLDERS = "a checkpoint exists once it is listed: use all_steps() or utils.checkpoint_steps"
_BASE = "test for ocp.CheckpointManager or ocp.Checkpointer, or duck-type"
_PROCESSES = "use jax.experimental.multihost_utils, or ocp.utils.sync_global_processes"
_STORAGE = "Holdfast writes its own files, and needs no such option; leave it out"
_ARGS = "use that of ocp.args, whose name does not end with Args"

MISSING: Mapping[str, Mapping[str, str]] = {
    "": {
        "AbstractCheckpointManager": _BASE,
        "AbstractCheckpointer": _BASE,
        "abstract_checkpoint_manager": _BASE,
        "AsyncCheckpointHandler": _HANDLERS,
        "BasePyTreeCheckpointHandler": "use ocp.PyTreeCheckpointHandler",
        "CompositeOptions": _STORAGE,
        "Future": "use manager.wait_until_finished()",
        "future": "use manager.wait_until_finished()",
        "ProtoCheckpointHandler": _PROTO,
        "RestoreTransform": _TRANSFORMS,
        "Transform": _TRANSFORMS,
        "aggregate_handlers": _HANDLERS,
        "apply_transformations": _TRANSFORMS,
        "arrays": "use ocp.RestoreArgs and ocp.ArrayRestoreArgs",
        "logging": "Holdfast records events by itself; see holdfast events",
        "msgpack_utils": "use flax.serialization",
        "multihost": _PROCESSES,
        "path": "use ocp.step",
        "pathways": "use JAX without Pathways",
        "serialization": "use ocp.CheckpointManager",
        "test_utils": "make folders by pathlib, and compare trees by numpy.testing",
        "transform_utils": _TRANSFORMS,
        "type_handlers": "use ocp.SaveArgs, ocp.RestoreArgs, ocp.ArrayRestoreArgs; convert leaves "
        "of types that are registered with Orbax to arrays",
    },
    "args": {
        "ProtoRestore": _PROTO,
        "ProtoSave": _PROTO,
        "get_registered_args_cls": _HANDLERS,
        "get_registered_handler_cls": _HANDLERS,
        "has_registered_args": _HANDLERS,
    },
    "checkpoint_managers": {
        "AbstractCheckpointManager": _BASE,
        "CheckpointManager": "use ocp.CheckpointManager",
        "CheckpointManagerOptions": "use ocp.CheckpointManagerOptions",
    },
    "checkpoint_utils": {
        "get_snapshot_dir_from_step_dir": "an open checkpoint needs no snapshot; leave it out",
    },
    "handlers": {
        "ArrayRestoreArgs": _ARGS,
        "ArraySaveArgs": _ARGS,
        "AsyncCheckpointHandler": _HANDLERS,
        "CompositeArgs": _ARGS,
        "CompositeResults": "use ocp.args.Composite",
        "JaxRandomKeyRestoreArgs": _ARGS,
        "JaxRandomKeySaveArgs": _ARGS,
        "JsonRestoreArgs": _ARGS,
        "JsonSaveArgs": _ARGS,
        "NumpyRandomKeyRestoreArgs": _ARGS,
        "NumpyRandomKeySaveArgs": _ARGS,
        "ProtoCheckpointHandler": _PROTO,
        "ProtoRestoreArgs": _PROTO,
        "ProtoSaveArgs": _PROTO,
        "PyTreeRestoreArgs": _ARGS,
        "PyTreeSaveArgs": _ARGS,
        "StandardRestoreArgs": _ARGS,
        "StandardSaveArgs": _ARGS,
        "create_default_handler_registry": "use ocp.handlers.CheckpointHandlerRegistry()",
        "handler_registration": "use ocp.handlers.CheckpointHandlerRegistry",
    },
    "options": {
        "AtomicityMode": _STORAGE,
        "AtomicityOptions": _STORAGE,
        "MemoryLimitOptions": _STORAGE,
    },
    "step": {
        "all_temporary_paths": _FOLDERS,
        "build_step_metadatas": "use ocp.step.latest_step_metadata, or name_format.find_all",
        "checkpoint_steps_paths": "use ocp.utils.checkpoint_steps_paths",
        "get_save_directory": "use ocp.step.build_step_path",
        "is_checkpoint_finalized": "use ocp.utils.is_checkpoint_finalized",
        "is_path_finalized": _FOLDERS,
        "is_path_temporary": _FOLDERS,
        "is_standard_name_format": "compare with what ocp.step.standard_name_format returned",
        "is_tmp_checkpoint": _FOLDERS,
        "maybe_find_step_metadata": "use ocp.step.find_step_path",
        "single_host_load_and_broadcast_name_format": "use ocp.step.standard_name_format",
        "step_metadata_of_checkpoint_path": "use ocp.step.step_from_checkpoint_name",
        "step_prefix_with_underscore": "use ocp.step.standard_name_format",
        "tmp_checkpoints": _FOLDERS,
    },
    "tree": {
        "tree_difference": "compare what ocp.tree.to_flat_dict returns",
        "tree_trim": "restore a part by PyTreeRestore(partial_restore=True)",
    },
    "utils": {
        "all_leaves_are_placeholders": "compare leaves with ocp.PLACEHOLDER",
        "fully_replicated_host_local_array_to_global_array": _PROCESSES,
        "get_save_directory": "use ocp.step.build_step_path",
        "is_gcs_path": "give the URL to holdfast.CheckpointManager",
        "is_pathways_backend": "use JAX without Pathways",
        "is_tmp_checkpoint": _FOLDERS,
        "leaf_is_placeholder": "compare leaves with ocp.PLACEHOLDER",
        "leaf_placeholder": "use ocp.PLACEHOLDER",
        "name_from_leaf_placeholder": "use ocp.PLACEHOLDER",
        "pytree_structure": "use manager.item_metadata(step)",
        "reached_preemption": "use manager.reached_preemption(step)",
        "record_saved_duration": "Holdfast records events by itself; see holdfast events",
        "tmp_checkpoints": _FOLDERS,
    },
    "v1": {},
    "v1.arrays": {},
    "v1.errors": {},
    "v1.handlers": {},
    "v1.multihost": {},
    "v1.options": {},
    "v1.partial": {},
    "v1.path": {},
    "v1.path.step": {},
    "v1.training": {
        "pathways": "use JAX without Pathways",
    },
    "v1.training.errors": {},
    "v1.tree": {},
}
"""What to use instead, by module and name. The page `docs/orbax.md` lists the most used."""


class MissingNameError(InvalidArgumentError, AttributeError):
    """A module of Holdfast has no such name of Orbax."""


def refusal(module: str) -> Callable[[str], NoReturn]:
    """Return the function `__getattr__` of the module with this name for programs."""

    def refuse(name: str) -> NoReturn:
        place = ".".join(filter(None, (_ROOT, module)))
        advice = MISSING[module].get(name, "the page on Orbax lists what is there")
        raise MissingNameError(f"{place}.{name}: it is not there; {advice}")

    return refuse
