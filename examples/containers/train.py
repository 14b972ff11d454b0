"""Train a small model in a container.

Environment: RUN is the run's directory, STEPS the number of steps (100), and STEP_SECS the least
time of one (0).
"""

import os
import time

import numpy as np

import holdfast
from holdfast import save_decision_policy as policies

RUN = os.environ["RUN"]
STEPS = int(os.environ.get("STEPS", "100"))
STEP_SECS = float(os.environ.get("STEP_SECS", "0"))


def main() -> None:
    """Go on from the newest checkpoint until the last step, or until told to leave."""
    state = {"w": np.zeros(1000), "seen": 0}
    with holdfast.CheckpointManager(
        RUN,
        framework="numpy",
        save_decision_policy=policies.FixedIntervalPolicy(1000),
        ram=holdfast.RamTier(save_decision_policy=policies.FixedIntervalPolicy(1)),
    ) as manager:
        start, state = manager.resume(state)
        sources = manager.last_restore.sources if manager.last_restore else {}
        print("start", start, *sources, flush=True)
        for step in range(start, STEPS):
            state = {"w": state["w"] + step, "seen": state["seen"] + 1}
            time.sleep(STEP_SECS)
            manager.save(step, state)
            print("step", step, flush=True)
            if manager.reached_preemption(step):
                return
        manager.finish(STEPS - 1, state)


if __name__ == "__main__":
    main()
