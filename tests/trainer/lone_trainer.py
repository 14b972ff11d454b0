"""A training in one place that saves step 5 to RAM alone, and then waits to be killed.

Argument: directory. It prints a JSON line once the step is in RAM.
"""

from __future__ import annotations

import sys
import time

# Started as a script, whose folder has the other one.
from two_tier_trainer import say, state_of

import holdfast
from holdfast import save_decision_policy


def main() -> None:
    never = save_decision_policy.SpecificStepsPolicy([10**9])
    ram = holdfast.RamTier(save_decision_policy=save_decision_policy.FixedIntervalPolicy(5))
    manager = holdfast.CheckpointManager(sys.argv[1], save_decision_policy=never, ram=ram)
    manager.resume(state_of(-1))
    assert manager.save(5, state_of(5))
    manager._progress.wait(lambda sealed, finished: sealed, 30)
    say(sealed=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
