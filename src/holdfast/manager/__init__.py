"""The trainer's side of Holdfast; see `holdfast.manager.checkpoint_manager`."""

from holdfast.job.options import RamTier as RamTier
from holdfast.manager.checkpoint_manager import CheckpointManager as CheckpointManager
