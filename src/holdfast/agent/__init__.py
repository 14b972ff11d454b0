"""The host's process: it owns the host's memory, persists, commits, and outlives the trainer.

It imports neither JAX nor PyTorch. `python -m holdfast.agent` runs one; trainers start it.
"""
