"""A small training run for the command line's tests. Arguments: directory, options as JSON.

It prints a line once it has opened the run and one for each step. Options: `steps`; `every`, the
interval of durable saves; `sleep`, seconds a step; `restore`, a step to go back to first;
`linger`, the agent's; `finish`, the last step, unless it was preempted; `ram_every`;
`break_storage`, after opening, for `writing` or for `listing` too; `leave`, without closing the
manager, after so many seconds; `leave_sealed`, without closing it, once RAM has that step, or the
first later one that is saved; `lost`,
without closing it, once its saves are durable, so that the agent lingers; `megabytes` of more
state.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.format.names import CheckpointId
from tests.hosts import events, wait_until


class Iterator:
    def __init__(self) -> None:
        self.position = 0

    def get_state(self) -> dict:
        return {"position": self.position}

    def set_state(self, state: dict) -> None:
        self.position = state["position"]


def policy(interval: int):
    return save_decision_policy.FixedIntervalPolicy(interval)


def leave_sealed(run: Path, step: int) -> None:
    wait_until(lambda: any(event["step"] == step for event in events(run, "sealed")))
    os._exit(0)


def main() -> None:
    directory, options = sys.argv[1], json.loads(sys.argv[2])
    state = {
        "params": {"kernel": np.zeros((64, 32), np.float32), "bias": np.zeros(32, np.int8)},
        "note": "[bold]",
        "data": Iterator(),
        "ballast": np.zeros(options.get("megabytes", 0) * 10**6, np.int8),
    }
    ram = holdfast.RamTier(
        linger_secs=options.get("linger", 30),
        save_decision_policy=policy(options["ram_every"]) if "ram_every" in options else None,
    )
    manager = holdfast.CheckpointManager(
        directory,
        save_decision_policy=policy(options.get("every", 1)),
        preservation_policy=preservation_policy.LatestN(100),
        ram=ram,
    )
    start, state = manager.resume(state)
    if "restore" in options:
        start, state = manager.resume(state, step=options["restore"])
    folder = Path(directory) / "checkpoints"
    if options.get("break_storage") == "writing":
        folder.mkdir()
        (folder / str(CheckpointId(0, manager._session.place.attempt))).write_text("in the way")
    elif options.get("break_storage") == "listing":
        folder.write_text("not a folder")
    print("open", os.environ.get("HOLDFAST_RESTART_COUNT", ""), flush=True)
    for step in range(start, options["steps"]):
        state["params"]["kernel"] += 1
        metrics = {"loss": 1 / (step + 1), "bad": float("nan")}
        is_saved = manager.save(step, state, metrics=metrics)
        print(step, flush=True)
        if is_saved and step >= options.get("leave_sealed", math.inf):
            leave_sealed(Path(directory), step)
        time.sleep(options.get("sleep", 0))
        if manager.reached_preemption(step):
            break
    else:
        if options.get("finish"):
            manager.finish(options["steps"] - 1, state)
    if options.get("leave"):
        time.sleep(options["leave"])
        os._exit(0)
    if options.get("lost"):
        manager.wait_until_finished()
        os._exit(0)
    manager.close()


if __name__ == "__main__":
    main()
