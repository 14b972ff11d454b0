"""`CheckpointManager`: what a training loop holds; see `holdfast.manager.checkpoint_manager`."""

from holdfast.manager.checkpoint_manager import CheckpointManager as CheckpointManager
from holdfast.manager.options import RamTier as RamTier
