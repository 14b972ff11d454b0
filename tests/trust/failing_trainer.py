"""Train while the storage fails, and print the reported failures.

Arguments: directory, options as JSON. It prints a JSON line for its start, each step (with the
seconds that `save` took), each failure that was raised and its end; it ends once the file `until`
exists, and closes its manager as a `with` does. What is restored is checked: the state of a step is
all of that step.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import SaveFailedError


def state_of(step: int, size: int) -> dict:
    return {"w": jnp.full(size, float(step)), "host": np.full(100, step), "seen": step}


def is_right(state: dict, step: int) -> bool:
    same = (np.asarray(state["w"]) == step).all() and (state["host"] == step).all()
    return bool(same) and state["seen"] == step


@jax.jit
def advance(w):
    return w + 1.0


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def say_failed(error: SaveFailedError, step: int) -> None:
    """Print a line for each step whose failure this error is the first to report."""
    for failed in error.steps:
        say(failed=failed, at=step, reason=str(error))


def train(manager: holdfast.CheckpointManager, options: dict) -> None:
    start, state = manager.resume(state_of(-1, options["size"]))
    say(start=start, right=is_right(state, start - 1))
    while "after" in options and not Path(options["after"]).exists():
        time.sleep(0.01)
    until, step = Path(options["until"]), start
    while not until.exists():
        state = {"w": advance(state["w"]), "host": state["host"] + 1, "seen": step}
        jax.block_until_ready(state["w"])
        began = time.monotonic()
        try:
            saved = manager.save(step, state)
        except SaveFailedError as error:
            say_failed(error, step)
            saved = False
        say(step=step, saved=saved, secs=time.monotonic() - began)
        time.sleep(options["pause"])
        step += 1
    if options.get("ends_with_a_save"):
        save_last(manager, step, state)


def save_last(manager: holdfast.CheckpointManager, step: int, state: dict) -> None:
    """Save once more, after all earlier failures are reported; `close` raises its failure."""
    state = {"w": advance(state["w"]), "host": state["host"] + 1, "seen": step}
    is_saved = False
    while not is_saved:
        try:
            is_saved = manager.save(step, state, force=True)
        except SaveFailedError as error:
            say_failed(error, step)
    say(last=step)


def main() -> None:
    directory, options = sys.argv[1], json.loads(sys.argv[2])
    logging.basicConfig(level=logging.WARNING)
    ram = options.get("ram", {"linger_secs": 30})
    with holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(options["interval"]),
        preservation_policy=preservation_policy.LatestN(2),
        ram=holdfast.RamTier(**ram) if ram is not None else None,
    ) as manager:
        train(manager, options)
        if options.get("ends_with_a_save"):
            return
        try:
            manager.wait_until_finished(options.get("wait_secs", 60))
            say(finished=True)
        except holdfast.errors.HoldfastError as error:
            say(finished=False, error=type(error).__name__, of=getattr(error, "step", None))
    say(closed=True)


if __name__ == "__main__":
    main()
