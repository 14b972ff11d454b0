"""Continuous saves find a slot ready, so that no step donates what a checkpoint still holds."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.engine.saving.part_writer import PartWriter
from holdfast.trainer.save.save_queue import SaveRequest
from holdfast.trainer.save.saver import Saver
from tests.hosts import Host

SIZE = 4_000_000
SAVES = 40
STEP_SECS = 0.003


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Each save's step, and whether its slot was ready when the training thread came with it."""
    begun: list[tuple[int, bool]] = []
    begin = Saver._open_prepared

    def noted(
        self: Saver, request: SaveRequest, held: contextlib.ExitStack | None = None
    ) -> PartWriter | None:
        part = begin(self, request, held)
        if held is not None:
            begun.append((request.plan.id.step, part is not None))
        return part

    monkeypatch.setattr(Saver, "_open_prepared", noted)
    return begun


def test_a_target_is_met_at_the_step_at_which_a_slot_is_free(
    one_host: Host, tmp_path: Path, begun: list[tuple[int, bool]]
) -> None:
    step_function = jax.jit(lambda x: x + 1, donate_argnums=0)
    state, step = jnp.zeros(SIZE), 0
    policy = save_decision_policy.ContinuousCheckpointingPolicy()
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=policy) as saving:
        while len(begun) < SAVES:
            state = jax.block_until_ready(step_function(state))
            saving.save(step, state)
            time.sleep(STEP_SECS)
            step += 1
    # The first step may come before the first slot is made.
    late = [number for number, was_ready in begun if number > 0 and not was_ready]
    assert not late


@pytest.mark.parametrize(
    "policy", [None, save_decision_policy.FixedIntervalPolicy(10)], ids=["default", "fixed"]
)
def test_the_first_save_of_a_large_state_waits_for_its_slot(
    policy: Any, one_host: Host, tmp_path: Path, begun: list[tuple[int, bool]]
) -> None:
    state = jnp.arange(20_000_000)
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=policy) as saving:
        assert saving.save(0, state)
    assert begun == [(0, True)]
    with holdfast.CheckpointManager(tmp_path / "run") as again:
        restored = again.restore(like=state)
    assert (restored == state).all()
