"""A trainer that keeps a journal of its own times, by the host's monotonic clock.

Arguments: directory, journal, options as JSON: `steps`; `step_secs`; `every`, the interval of
saves; `wait_every` and `wait_secs` of waits for data; `first_secs`, more time before the first
step. The journal does not use Holdfast: it is what a report is compared with.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import holdfast
from holdfast import save_decision_policy


def main() -> None:
    directory, path, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    with path.open("a", buffering=1) as journal:

        def note(**members: object) -> None:
            journal.write(json.dumps(members) + "\n")

        manager = holdfast.CheckpointManager(
            directory,
            framework="numpy",
            save_decision_policy=save_decision_policy.FixedIntervalPolicy(options["every"]),
        )
        start, state = manager.resume({"w": np.zeros(100_000, np.float32)})
        time.sleep(options["first_secs"])
        for step in range(start, options["steps"]):
            if step % options["wait_every"] == 0 and step > start:
                began = time.monotonic()
                note(waits=began)
                with manager.waiting("data"):
                    time.sleep(options["wait_secs"])
                note(waited=time.monotonic() - began)
            time.sleep(options["step_secs"])
            state["w"] += 1
            ended = time.monotonic()
            note(step=step, ended=ended)
            if manager.save(step, state):
                note(blocked=time.monotonic() - ended)
        began = time.monotonic()
        manager.close()
        note(blocked=time.monotonic() - began)


if __name__ == "__main__":
    main()
