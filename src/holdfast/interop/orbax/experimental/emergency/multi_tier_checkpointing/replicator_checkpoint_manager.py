"""The multi-tier manager under Orbax's newer path."""

from holdfast.interop.orbax.tiers import ReplicatorCheckpointManager as ReplicatorCheckpointManager
from holdfast.interop.orbax.tiers import (
    ReplicatorCheckpointManagerOptions as ReplicatorCheckpointManagerOptions,
)

__all__ = ["ReplicatorCheckpointManager", "ReplicatorCheckpointManagerOptions"]
