"""Overwrite step 2 with Orbax's second interface, and die once it was accepted.

Arguments: directory, size of the array.
"""

from __future__ import annotations

import os
import signal
import sys

import jax.numpy as jnp

from holdfast.interop.orbax import v1


def main() -> None:
    every = v1.training.save_decision_policies.FixedIntervalPolicy(1)
    checkpointer = v1.training.Checkpointer(sys.argv[1], save_decision_policy=every)
    state = {"w": jnp.full(int(sys.argv[2]), 9)}
    assert checkpointer.save_async(2, state, overwrite=True) is not None
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
