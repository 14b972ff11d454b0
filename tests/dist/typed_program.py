"""A user's program, which a strict type checker accepts with the wheel alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy

State = dict[str, npt.NDArray[np.float64]]


def train(steps: int) -> State:
    state: State = {"w": np.zeros(1000)}
    with holdfast.CheckpointManager(
        "runs/gpt",
        save_decision_policy=save_decision_policy.ContinuousCheckpointingPolicy(
            minimum_interval_secs=30
        ),
        preservation_policy=preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(10), preservation_policy.EveryNSeconds(180)]
        ),
        ram=holdfast.RamTier(copies=1),
        network=holdfast.HostNetwork(failure_domain="rack"),
        process=holdfast.ProcessHooks(terminal_lines=False),
    ) as manager:
        start: int
        start, state = manager.resume(state)
        report: holdfast.RestoreReport | None = manager.last_restore
        print(report)
        for step in range(start, steps):
            state = {"w": state["w"] + 1}
            is_begun: bool = manager.save(step, state)
            if is_begun and manager.reached_preemption(step):
                break
        else:
            manager.finish(steps - 1, state)
    return state


def read(path: str) -> tuple[int | None, object]:
    try:
        run: holdfast.Run = holdfast.open_run(path)
    except errors.NotARunError as error:
        raise SystemExit(str(error)) from error
    with run:
        return run.latest_step(), run.restore()


def keep(path: str, state: State) -> object:
    holdfast.save(path, state, overwrite=True)
    return holdfast.load(path)
