"""Saves every step of a run, and keeps two checkpoints, until it is told to stop.

Arguments: directory. It prints `ready` after the first save and `stopped SAVES` at its end.
"""

from __future__ import annotations

import select
import sys

import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy

SIZE = 200_000


def main(directory: str) -> None:
    w, step = np.zeros(SIZE), -1
    with holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=preservation_policy.LatestN(2),
    ) as training:
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            step += 1
            w[:] = step
            training.save(step, {"w": w, "small": np.full(3, step), "n": step})
            if step == 0:
                training.wait_until_finished()
                print("ready", flush=True)
    print("stopped", step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
