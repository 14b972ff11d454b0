"""The emergency manager under Orbax's names."""

from holdfast.interop.orbax.tiers import CoordinationOptions as MultiprocessingOptions
from holdfast.interop.orbax.tiers import DurableOptions as PersistentCheckpointOptions
from holdfast.interop.orbax.tiers import EmergencyCheckpointManager as CheckpointManager
from holdfast.interop.orbax.tiers import EmergencyOptions as CheckpointManagerOptions
from holdfast.interop.orbax.tiers import RamOptions as LocalCheckpointOptions

__all__ = [
    "CheckpointManager",
    "CheckpointManagerOptions",
    "LocalCheckpointOptions",
    "MultiprocessingOptions",
    "PersistentCheckpointOptions",
]
