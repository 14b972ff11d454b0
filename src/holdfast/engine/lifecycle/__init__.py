"""A run, its attempts and its checkpoints: opening, commit, recovery, retention."""
