"""`CheckpointManager` for training loops, `Run` for readers, `save` and `load` for one state."""

from holdfast.job.options import RamTier as RamTier
from holdfast.job.options import RemoteTier as RemoteTier
from holdfast.manager.checkpoint_manager import CheckpointManager as CheckpointManager
from holdfast.manager.one_shot import load as load
from holdfast.manager.one_shot import save as save
from holdfast.manager.run import Run as Run
from holdfast.manager.run import open_run as open_run
