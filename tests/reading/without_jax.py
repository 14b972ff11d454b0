"""Trains, reads, saves and loads where JAX cannot be imported. Argument: a directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.modules["jax"] = None  # type: ignore[assignment]
sys.modules["jaxlib"] = None  # type: ignore[assignment]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import holdfast  # noqa: E402
from holdfast import errors, save_decision_policy  # noqa: E402


def state(step: int) -> dict[str, Any]:
    return {"w": np.full((3, 4), step, ml_dtypes.bfloat16), "opt": [np.arange(3), (step, None)]}


def same(one: dict[str, Any], step: int) -> bool:
    other = state(step)
    return bool(
        (one["w"] == other["w"]).all()
        and one["w"].dtype == other["w"].dtype
        and (one["opt"][0] == other["opt"][0]).all()
        and one["opt"][1] == other["opt"][1]
    )


def main(directory: Path) -> None:
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    with holdfast.CheckpointManager(directory / "run", save_decision_policy=every_step) as training:
        assert training.resume(state(-1))[0] == 0
        value = state(0)
        assert training.save(0, value)
        value["w"][:] = 9
        training.wait_until_finished()
        assert same(training.restore(), 0)
    with holdfast.CheckpointManager(directory / "run", save_decision_policy=every_step) as training:
        start, resumed = training.resume(state(-1))
        assert start == 1
        assert same(resumed, 0)
        assert training.save(1, state(1))
    with holdfast.open_run(directory / "run") as run:
        assert run.wait_for_step(after=0, timeout_secs=240) == 1
        assert same(run.restore(), 1)
        assert same(run.restore(like=state(-1)), 1)
    holdfast.save(directory / "one", state(5))
    assert same(holdfast.load(directory / "one"), 5)
    with pytest.raises(errors.InvalidArgumentError, match=r"holdfast-checkpoint\[jax\]"):
        holdfast.CheckpointManager(directory / "run", framework="jax")
    assert sys.modules["jax"] is None
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
