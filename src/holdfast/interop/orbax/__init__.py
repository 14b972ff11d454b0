"""Orbax's interface on Holdfast: `import holdfast.interop.orbax as ocp`.

Programs that call `orbax.checkpoint` run with this module instead. Checkpoints are Holdfast's, so
saves return at once, bytes are verified, and a killed job loses nothing that was saved. The page
`docs/orbax.md` lists what is the same, what gets better, and what differs.
"""

from typing import TYPE_CHECKING

from holdfast.interop.orbax import args as args
from holdfast.interop.orbax import checkpoint_managers as checkpoint_managers
from holdfast.interop.orbax import checkpoint_utils as checkpoint_utils
from holdfast.interop.orbax import experimental as experimental
from holdfast.interop.orbax import handlers as handlers
from holdfast.interop.orbax import missing_names, shortcuts
from holdfast.interop.orbax import options as options
from holdfast.interop.orbax import step as step
from holdfast.interop.orbax import tree as tree
from holdfast.interop.orbax import v1 as v1
from holdfast.interop.orbax.checkpoint_manager import CheckpointManager as CheckpointManager
from holdfast.interop.orbax.checkpointers import AsyncCheckpointer as AsyncCheckpointer
from holdfast.interop.orbax.checkpointers import Checkpointer as Checkpointer
from holdfast.interop.orbax.checkpointers import PyTreeCheckpointer as PyTreeCheckpointer
from holdfast.interop.orbax.checkpointers import StandardCheckpointer as StandardCheckpointer
from holdfast.interop.orbax.handlers import ArrayCheckpointHandler as ArrayCheckpointHandler
from holdfast.interop.orbax.handlers import CheckpointHandler as CheckpointHandler
from holdfast.interop.orbax.handlers import CheckpointHandlerRegistry as CheckpointHandlerRegistry
from holdfast.interop.orbax.handlers import CompositeCheckpointHandler as CompositeCheckpointHandler
from holdfast.interop.orbax.handlers import (
    DefaultCheckpointHandlerRegistry as DefaultCheckpointHandlerRegistry,
)
from holdfast.interop.orbax.handlers import (
    JaxRandomKeyCheckpointHandler as JaxRandomKeyCheckpointHandler,
)
from holdfast.interop.orbax.handlers import JsonCheckpointHandler as JsonCheckpointHandler
from holdfast.interop.orbax.handlers import (
    NumpyRandomKeyCheckpointHandler as NumpyRandomKeyCheckpointHandler,
)
from holdfast.interop.orbax.handlers import PyTreeCheckpointHandler as PyTreeCheckpointHandler
from holdfast.interop.orbax.handlers import StandardCheckpointHandler as StandardCheckpointHandler
from holdfast.interop.orbax.leaf_args import PLACEHOLDER as PLACEHOLDER
from holdfast.interop.orbax.leaf_args import ArrayRestoreArgs as ArrayRestoreArgs
from holdfast.interop.orbax.leaf_args import RestoreArgs as RestoreArgs
from holdfast.interop.orbax.leaf_args import SaveArgs as SaveArgs
from holdfast.interop.orbax.options import AsyncOptions as AsyncOptions
from holdfast.interop.orbax.options import CheckpointManagerOptions as CheckpointManagerOptions
from holdfast.interop.orbax.tiers import EmergencyCheckpointManager as EmergencyCheckpointManager

checkpoint_args, merge_trees, utils = args, tree.merge_by_path, shortcuts

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("")

__all__ = [name for name in dir() if not name.startswith("_")]
