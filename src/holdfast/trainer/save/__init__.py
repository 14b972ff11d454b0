"""Save checkpoints from a trainer process."""
