"""Run the host's agent, which owns the host's memory, persists, commits, and outlives the trainer.

The package imports neither JAX nor PyTorch. `python -m holdfast.agent` runs one agent; trainers
start it.
"""
