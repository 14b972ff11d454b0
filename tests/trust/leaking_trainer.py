"""Save very often, or open a run very often, and wait to be inspected.

Arguments: directory, options as JSON. Options: `saves` and `sample`, after how many of them it
waits, or `openings`; `ram` (False: none). It waits after each line that it prints, until it
receives one.
"""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy

WAIT_SECS = 240.0


def stand_still(**line: object) -> None:
    print(json.dumps(line), flush=True)
    sys.stdin.readline()


def manager(directory: str, options: dict) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=preservation_policy.LatestN(3),
        ram=holdfast.RamTier(linger_secs=600) if options.get("ram", True) else None,
    )


def save_often(directory: str, options: dict) -> None:
    with manager(directory, options) as run:
        start, state = run.resume({"w": jnp.zeros(2000), "host": np.zeros(100)})
        for step in range(start, start + options["saves"]):
            state = {"w": state["w"] + 1, "host": state["host"] + 1}
            assert run.save(step, state)
            # Now and then some are on their way at once, which without RAM the disk would refuse.
            if step % 4 == 3 or not options.get("ram", True):
                run.wait_until_finished(WAIT_SECS)
            if (step + 1) % options["sample"] == 0:
                run.wait_until_finished(WAIT_SECS)
                stand_still(saves=step + 1 - start)


def open_often(directory: str, options: dict) -> None:
    for opening in range(options["openings"]):
        with manager(directory, options) as run:
            start, state = run.resume({"n": 0})
            assert run.save(start, {"n": state["n"] + 1})
            run.wait_until_finished(WAIT_SECS)
            stand_still(opened=opening + 1)


def main() -> None:
    directory, options = sys.argv[1], json.loads(sys.argv[2])
    (open_often if "openings" in options else save_often)(directory, options)


if __name__ == "__main__":
    main()
