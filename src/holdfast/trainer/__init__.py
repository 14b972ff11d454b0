"""`CheckpointManager` for training loops, `Run` for readers, `save` and `load` for one state."""
