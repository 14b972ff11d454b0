"""What a step costs that is not due."""

from __future__ import annotations

import time
from pathlib import Path

import jax.numpy as jnp
import pytest

import holdfast
from holdfast import save_decision_policy
from tests.hosts import Host

CALLS = 20_000
COST_SECS_MAX = 5e-6
POLICIES = {
    "continuous": save_decision_policy.ContinuousCheckpointingPolicy(minimum_interval_secs=3600),
    "fixed_interval": save_decision_policy.FixedIntervalPolicy(10**9),
    "specific_steps": save_decision_policy.SpecificStepsPolicy([10**9]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_save_that_is_not_due_costs_less_than_five_microseconds(
    one_host: Host, tmp_path: Path, name: str
) -> None:
    state = {f"w{i}": jnp.zeros(10) for i in range(1000)}
    with holdfast.CheckpointManager(
        tmp_path / "run", save_decision_policy=POLICIES[name]
    ) as manager:
        manager.save(0, state, force=True)
        manager.wait_until_finished()
        step, costs_secs = 1, []
        # The best of some batches of this thread's time: others use the machine too.
        for _ in range(15):
            started = time.thread_time()
            for number in range(step, step + CALLS):
                manager.save(number, state)
            costs_secs.append((time.thread_time() - started) / CALLS)
            step += CALLS
            if costs_secs[-1] < COST_SECS_MAX:
                break
    cost_secs = min(costs_secs)
    print(f"{name}: {cost_secs * 1e6:.2f} µs")
    assert cost_secs < COST_SECS_MAX
