"""The options of the P2P manager under Orbax's names."""

from holdfast.interop.orbax.tiers import PeerDurableOptions as PersistentCheckpointOptions
from holdfast.interop.orbax.tiers import PeerOptions as CheckpointManagerOptions
from holdfast.interop.orbax.tiers import PeerRamOptions as LocalCheckpointOptions

__all__ = ["CheckpointManagerOptions", "LocalCheckpointOptions", "PersistentCheckpointOptions"]
