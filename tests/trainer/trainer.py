"""A training run whose state can be told from the step alone: each step has one right state.

Arguments: directory, steps, options as JSON. It prints a JSON line for what it resumed, for each
step, and for its end. One of its arrays is changed in place, the others are new at every step.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import xxhash

import holdfast
from holdfast import preservation_policy, save_decision_policy

SIZE = 300_000


def initial() -> dict:
    return {
        "w": np.zeros(SIZE, np.float32),
        "m": [np.zeros((64, 64)), np.int32(0)],
        "host": np.zeros(1000, np.int64),
        "seen": -1,
    }


def advance(state: dict, step: int) -> dict:
    noise = np.random.default_rng(step).normal(size=(64, 64))
    mean, count = state["m"]
    state["host"] += step
    return state | {"w": state["w"] + 1, "m": [mean * 0.9 + noise, count + 1], "seen": step}


def fingerprint(state: dict) -> str:
    assert (state["w"] == state["w"][0]).all()
    parts = [state["w"][:3], *state["m"], state["host"], np.int64(state["seen"])]
    return xxhash.xxh3_64_hexdigest(b"".join(np.ascontiguousarray(p).tobytes() for p in parts))


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    directory, steps, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    ram = options.get("ram", {"linger_secs": 30})
    if ram is not None and "every" in ram:
        ram["save_decision_policy"] = save_decision_policy.FixedIntervalPolicy(ram.pop("every"))
    policy = None
    if "interval" in options:
        policy = save_decision_policy.FixedIntervalPolicy(options["interval"])
    manager = holdfast.CheckpointManager(
        directory,
        save_decision_policy=policy,
        preservation_policy=preservation_policy.LatestN(options.get("keep", 3)),
        ram=holdfast.RamTier(**ram) if ram is not None else None,
        takeover=options.get("takeover", False),
    )
    with manager:
        start, state = manager.resume(initial())
        report = manager.last_restore
        sources = report.sources if report else {}
        say(start=start, sources=sources, fingerprint=fingerprint(state))
        for step in range(start, steps):
            state = advance(state, step)
            if options.get("sleep"):
                time.sleep(options["sleep"])
            saved = manager.save(step, state)
            say(step=step, saved=saved)
            if manager.reached_preemption(step):
                say(left=step)
                break
    say(end=True, fingerprint=fingerprint(state), latest=step)


if __name__ == "__main__":
    main()
