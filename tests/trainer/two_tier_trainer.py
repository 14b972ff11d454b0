"""A training with a remote tier, on NumPy: each step has one right state.

Arguments: directory, remote tier, options as JSON. It prints a JSON line for what it resumed, for
each step, and for its end.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy

FROZEN = np.arange(50_000, dtype=np.float32)


def state_of(step: int, size: int = 1000) -> dict[str, np.ndarray]:
    return {"frozen": FROZEN, "w": np.full(size, step, np.float64)}


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    directory, remote, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    manager = holdfast.CheckpointManager(
        directory,
        remote=holdfast.RemoteTier(
            remote,
            save_decision_policy=save_decision_policy.FixedIntervalPolicy(options.get("every", 1)),
            preservation_policy=preservation_policy.LatestN(options.get("remote_keep", 3)),
        ),
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=preservation_policy.LatestN(options.get("keep", 3)),
        takeover=options.get("takeover", False),
    )
    size = options.get("size", 1000)
    with manager:
        start, state = manager.resume(state_of(-1, size))
        report = manager.last_restore
        assert (state["w"] == start - 1).all()
        assert np.array_equal(state["frozen"], FROZEN)
        say(start=start, sources=report.sources if report else {})
        for step in range(start, start + options["steps"]):
            saved = manager.save(step, state_of(step, size))
            say(step=step, saved=saved)
            time.sleep(options.get("sleep", 0))
    say(end=True)


if __name__ == "__main__":
    main()
