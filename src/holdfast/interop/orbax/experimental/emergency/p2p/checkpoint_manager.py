"""The P2P manager under Orbax's name."""

from holdfast.interop.orbax.tiers import PeerCheckpointManager as CheckpointManager

__all__ = ["CheckpointManager"]
