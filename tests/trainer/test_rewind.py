"""A training that goes back to a checkpoint that the guard of the loss vouches for."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.data import Order
from holdfast.errors import InvalidArgumentError, StepNotFoundError

STEPS = 120
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4000, 8))
Y = X @ np.arange(8) + 0.1 * RNG.normal(size=4000)


def new_order() -> Order:
    return Order(len(X), batch=32, seed=1)


def updated(w: np.ndarray, x: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the parameters after a step, and its loss."""
    error = x[samples] @ w - Y[samples]
    return w - 0.02 * x[samples].T @ error / len(samples), float(np.mean(error**2))


def managed(directory: Path, guard: holdfast.LossGuard | None) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(3),
        preservation_policy=preservation_policy.LatestN(1),
        guard=guard,
    )


def new_state(guard: holdfast.LossGuard) -> dict[str, Any]:
    return {"w": np.zeros(8), "order": new_order(), "guard": guard}


def trained(
    directory: Path, x: np.ndarray, stop: int = STEPS
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Train until `stop` with a guard; return the state, and (step, start) of each way back."""
    guard, rewinds = holdfast.LossGuard(patience=8), []
    state = new_state(guard)
    with managed(directory, guard) as manager:
        step, state = manager.resume(state)
        while step < stop:
            state["w"], loss = updated(state["w"], x, state["order"].at(step).samples)
            if guard.rejects(step, loss):
                at = step
                step, state = manager.rewind(state, order=state["order"])
                rewinds.append((at, step))
                continue
            manager.save(step, state)
            manager.wait_until_finished()
            step += 1
    return state, rewinds


def loss_of(w: np.ndarray) -> float:
    return float(np.mean((X @ w - Y) ** 2))


@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_a_guarded_run_is_the_run_that_left_the_poisoned_samples_out(
    tmp_path: Path, value: float
) -> None:
    poisoned = X.copy()
    poisoned_sample = int(new_order().at(70).samples[5])
    poisoned[poisoned_sample] = value
    state, rewinds = trained(tmp_path / "run", poisoned)
    ((at, start),) = rewinds
    assert at == 70
    # The newest checkpoint at least 8 good steps before, though the policy keeps only the newest.
    assert 55 < start <= 62
    clean, order = np.zeros(8), new_order()
    order.skip(start, steps=at + 1 - start)
    losses = []
    for step in range(STEPS):
        clean, loss = updated(clean, X, order.at(step).samples)
        losses.append(loss)
    assert np.array_equal(state["w"], clean)
    assert loss_of(state["w"]) == loss_of(clean) < 1.5 * min(losses)
    unguarded, order = np.zeros(8), new_order()
    for step in range(STEPS):
        unguarded, _ = updated(unguarded, poisoned, order.at(step).samples)
    assert not loss_of(unguarded) < 100 * loss_of(clean)
    with holdfast.open_run(tmp_path / "run") as run:
        later = [step for step in run.all_steps() if step >= start]
        assert {run.metadata(step).attempt for step in later} == {2}
        assert later[-1] >= STEPS - 3


def test_a_guard_that_is_restored_vouches_for_what_was_saved_before_the_restart(
    tmp_path: Path,
) -> None:
    trained(tmp_path / "run", X, stop=50)
    guard = holdfast.LossGuard(patience=8)
    with managed(tmp_path / "run", guard) as manager:
        start, state = manager.resume(new_state(guard))
        assert (start, guard.vouched) == (49, 40)
        assert guard.rejects(start, float("nan"))
        order = state["order"]
        again, state = manager.rewind(state, order=order)
        assert again <= 41
        assert order is state["order"]
        assert np.array_equal(order.at(again).samples, new_order().at(start + 1).samples)
        # The run has moved: the next save is of the step after the one restored.
        assert manager.save(again + 1, state, force=True)
        manager.wait_until_finished()
        assert manager.all_steps()[-1] == again + 1
        assert 48 not in manager.all_steps()


def test_without_a_vouched_checkpoint_the_position_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = holdfast.LossGuard()
    with managed(tmp_path / "run", guard) as manager:
        state = new_state(guard)
        manager.save(0, state, force=True)
        assert guard.rejects(1, float("inf"))
        with pytest.raises(StepNotFoundError, match="vouched for, found that none is yet"):
            manager.rewind(state)
        assert manager.save(1, state, force=True)
    assert "is not in the state" not in caplog.text
    left_out, order = holdfast.LossGuard(), new_order()
    with managed(tmp_path / "other", left_out) as manager:
        del state
        gc.collect()
        assert order.at(0).step == 0
        manager.save(0, {"w": np.zeros(8)}, force=True)
    assert "the guard is not in the state: after a restart it knows no losses" in caplog.text
    assert "no holdfast.data.Order is in the state: a restart loses" in caplog.text
    with (
        managed(tmp_path / "third", None) as manager,
        pytest.raises(InvalidArgumentError, match="pass guard="),
    ):
        manager.rewind({"w": np.zeros(8)})


def went_back(directory: Path, poisoned: set[int], **options: Any) -> list[tuple[int, int]]:
    """Train 60 steps on samples in their order, of which some give a NaN; return the ways back."""
    guard = holdfast.LossGuard(patience=3)
    order = Order(4000, batch=1, shuffle=False)
    state: dict[str, Any] = {"n": 0, "guard": guard}
    if options.get("order_in_state", True):
        state["order"] = order
    used: list[int] = []
    rewinds: list[tuple[int, int]] = []
    policy = save_decision_policy.FixedIntervalPolicy(5)
    with holdfast.CheckpointManager(
        directory, save_decision_policy=policy, guard=guard, framework="numpy"
    ) as manager:
        step, state = manager.resume(state)
        while step < 60:
            sample = int(order.at(step).samples[0])
            used.append(sample)
            if guard.rejects(step, float("nan") if sample in poisoned else 1.0):
                at = step
                step, state = manager.rewind(state, order=order)
                rewinds.append((at, step))
                continue
            manager.save(step, state)
            manager.wait_until_finished()
            step += 1
    assert all(used.count(sample) == 1 for sample in poisoned), rewinds
    return rewinds


@pytest.mark.parametrize("order_in_state", [True, False])
def test_no_poisoned_sample_is_used_again_after_several_ways_back(
    tmp_path: Path, order_in_state: bool
) -> None:
    rewinds = went_back(tmp_path / "run", {30, 32, 33}, order_in_state=order_in_state)
    # Each way back leads to the checkpoint that the first one led to: it is still vouched for.
    assert {start for _, start in rewinds} == {26}
    assert len(rewinds) == 3


def test_a_training_that_does_not_come_further_is_refused_wherever_it_fails(tmp_path: Path) -> None:
    guard = holdfast.LossGuard(patience=3, rewinds=3)
    policy = save_decision_policy.FixedIntervalPolicy(5)
    ways: list[int] = []

    def train() -> None:
        step, state = manager.resume({"guard": guard})
        while step < 40:
            if guard.rejects(step, float("nan") if step == 30 - len(ways) % 2 else 1.0):
                step, state = manager.rewind(state)
                ways.append(step)
                continue
            manager.save(step, state)
            manager.wait_until_finished()
            step += 1

    with (
        holdfast.CheckpointManager(
            tmp_path / "run", save_decision_policy=policy, guard=guard, framework="numpy"
        ) as manager,
        pytest.raises(StepNotFoundError, match="went back 3 times"),
    ):
        train()
    assert ways == [26, 26, 26]
