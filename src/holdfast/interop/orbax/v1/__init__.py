"""Orbax's second interface: `from holdfast.interop.orbax import v1 as ocp`."""

from typing import TYPE_CHECKING

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.leaf_args import PLACEHOLDER as PLACEHOLDER
from holdfast.interop.orbax.v1 import aliases
from holdfast.interop.orbax.v1 import arrays as arrays
from holdfast.interop.orbax.v1 import errors as errors
from holdfast.interop.orbax.v1 import handlers as handlers
from holdfast.interop.orbax.v1 import multihost as multihost
from holdfast.interop.orbax.v1 import options as options
from holdfast.interop.orbax.v1 import partial as partial
from holdfast.interop.orbax.v1 import path as path
from holdfast.interop.orbax.v1 import training as training
from holdfast.interop.orbax.v1 import tree as tree
from holdfast.interop.orbax.v1.context import Context as Context
from holdfast.interop.orbax.v1.handlers import AbstractCheckpointable as AbstractCheckpointable
from holdfast.interop.orbax.v1.handlers import Checkpointable as Checkpointable
from holdfast.interop.orbax.v1.handlers import CheckpointableHandler as CheckpointableHandler
from holdfast.interop.orbax.v1.handlers import StatefulCheckpointable as StatefulCheckpointable
from holdfast.interop.orbax.v1.one_path import checkpointables_metadata as checkpointables_metadata
from holdfast.interop.orbax.v1.one_path import delete as delete
from holdfast.interop.orbax.v1.one_path import delete_async as delete_async
from holdfast.interop.orbax.v1.one_path import is_orbax_checkpoint as is_orbax_checkpoint
from holdfast.interop.orbax.v1.one_path import load as load
from holdfast.interop.orbax.v1.one_path import load_async as load_async
from holdfast.interop.orbax.v1.one_path import load_checkpointables as load_checkpointables
from holdfast.interop.orbax.v1.one_path import (
    load_checkpointables_async as load_checkpointables_async,
)
from holdfast.interop.orbax.v1.one_path import metadata as metadata
from holdfast.interop.orbax.v1.one_path import save as save
from holdfast.interop.orbax.v1.one_path import save_async as save_async
from holdfast.interop.orbax.v1.one_path import save_checkpointables as save_checkpointables
from holdfast.interop.orbax.v1.one_path import (
    save_checkpointables_async as save_checkpointables_async,
)
from holdfast.interop.orbax.v1.responses import AsyncResponse as AsyncResponse
from holdfast.interop.orbax.v1.trees import CheckpointMetadata as CheckpointMetadata

load_pytree = aliases.of_function("load_pytree", load)
load_pytree_async = aliases.of_function("load_pytree_async", load_async)
save_pytree = aliases.of_function("save_pytree", save)
save_pytree_async = aliases.of_function("save_pytree_async", save_async)
pytree_metadata = aliases.of_function("pytree_metadata", metadata)
PyTreeMetadata = tree.PyTreeOf

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1")

__all__ = [name for name in dir() if not name.startswith("_")]
