"""One process of a job whose ranks meet after each step, until one of them stands still.

Arguments: coordinator's address, count, rank, directory, what to do as JSON. Prints JSON lines. An
error ends it as it ends any program: the traceback is the last thing on stderr.

`stands`: the rank, and before what it stands still: a step, or the call `open`, `resume`, `finish`.
`last`: the step after which the others do what is next. `raises`: they raise an error of their own.
`limits`: the durations of waits, by the names of their modules and constants.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback

import numpy as np

import holdfast
from holdfast import save_decision_policy, waits
from holdfast.errors import HoldfastError

TODO = json.loads(sys.argv[5])
if TODO.get("framework") == "torch":
    import torch_states as states
else:
    import jax_states as states

RANK = int(sys.argv[3])


def say(**line: object) -> None:
    # In one piece, since two threads say something.
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


def come_to(place: object) -> None:
    """Says where this rank is, and stands still there if it is to."""
    say(at=place)
    if TODO["stands"] == [RANK, place]:
        signal.pause()


def say_calls() -> None:
    """Says which call of the manager is under way, which a signal would end."""
    last = ""
    while True:
        call = next((call.name for call in list(waits._calls.values())), "")
        if call not in ("", last):
            say(calls=call)
        last = call
        time.sleep(0.005)


def state_of(step: int) -> dict[str, object]:
    return {"w": np.full(8, step), "n": step}


def main() -> None:
    address, count, directory = sys.argv[1], int(sys.argv[2]), sys.argv[4]
    for name, secs in TODO.get("limits", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, secs)
    threading.Thread(target=say_calls, daemon=True).start()
    states.start(address, count, RANK, 100)
    come_to("open")
    with holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(4),
        ram=holdfast.RamTier(linger_secs=60),
    ) as manager:
        come_to("resume")
        start, _ = manager.resume(state_of(0))
        for step in range(start, TODO["last"] + 1):
            come_to(step)
            manager.save(step, state_of(step))
            if step < TODO["last"] or "collective" in TODO or "finishes" in TODO:
                states.await_others(step)
        if "raises" in TODO:
            say(at="error")
            raise RuntimeError(TODO["raises"])
        if "finishes" in TODO:
            come_to("finish")
            manager.finish(step, state_of(step))


if __name__ == "__main__":
    try:
        main()
    except (HoldfastError, RuntimeError):
        # JAX's own end would wait for the other processes.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
