"""The driver of this host's node, and what it is driven with: the run, the trainers, the peers."""
