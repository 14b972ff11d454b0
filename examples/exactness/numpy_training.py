"""Train on random batches with NumPy, and lose nothing when the program is killed.

    holdfast prove -- python numpy_training.py

With `--careless` the batches come from a generator that is not in the state: `holdfast prove` shows
the first step that differs after a restart.
"""

import random
import sys

import numpy as np

import holdfast

STEPS = 30


def main() -> None:
    """Train."""
    careless = "--careless" in sys.argv
    random.seed(0)
    np.random.seed(0)
    state = {"w": np.zeros(100), "generator": np.random.default_rng(1).bit_generator.state}
    with holdfast.CheckpointManager("runs/numpy") as manager:
        start, state = manager.resume(state)
        generator = np.random.default_rng()
        generator.bit_generator.state = state["generator"]
        for step in range(start, STEPS):
            batch = np.random.normal(size=100) if careless else generator.normal(size=100)
            state["w"] += 0.1 * (batch - state["w"])
            state["generator"] = generator.bit_generator.state
            manager.save(step, state, metrics={"loss": float(np.square(state["w"]).mean())})
            if manager.reached_preemption(step):
                break
        else:
            manager.finish(STEPS - 1, state)


if __name__ == "__main__":
    main()
