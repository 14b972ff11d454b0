"""Run the host's agent, which owns the host's memory, persists, commits, and outlives the trainer.

The package imports neither JAX nor PyTorch. `python -m holdfast.host` runs one agent; trainers
start it. See docs/decisions/0047.
"""
