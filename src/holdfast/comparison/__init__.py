"""Compare two checkpoints: by digests, and by values where the digests differ."""
