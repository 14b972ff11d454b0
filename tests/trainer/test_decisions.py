"""A trainer publishes for each step that it has decided whether to save it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.errors import UnsupportedLeafError
from holdfast.host.wire.agent_directory import WORDS
from holdfast.host.wire.control_block import (
    NO_STEP,
    TARGET_DURABLE,
    ControlBlock,
    decided_cell,
    met_cell,
    met_step,
    step_cell,
)
from tests.hosts import Host


@pytest.fixture
def manager(one_host: Host, tmp_path: Path) -> Iterator[holdfast.CheckpointManager]:
    policy = save_decision_policy.FixedIntervalPolicy(2)
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=policy) as manager:
        yield manager


@pytest.fixture
def cells(one_host: Host, manager: holdfast.CheckpointManager) -> Iterator[memoryview]:
    with closing(ControlBlock(Path(one_host.agent().folder) / WORDS)) as control:
        yield control.cells


def test_it_has_decided_of_each_step_whether_it_is_saved_or_not(
    manager: holdfast.CheckpointManager, cells: memoryview
) -> None:
    assert cells[decided_cell(0)] == NO_STEP
    for step in range(5):
        assert manager.save(step, {"w": np.ones(3)}) is (step % 2 == 0)
        assert cells[decided_cell(0)] == cells[step_cell(0)] == step
    manager.finish(5, {"w": np.ones(3)})
    assert cells[decided_cell(0)] == cells[step_cell(0)] == 5


def test_it_decides_before_the_state_is_read(
    manager: holdfast.CheckpointManager, cells: memoryview
) -> None:
    decided = list[tuple[int, int]]()

    class Reader:
        def get_state(self) -> dict[str, int]:
            decided.append((cells[decided_cell(0)], met_step(cells[met_cell(0)], TARGET_DURABLE)))
            return {}

        def set_state(self, state: dict[str, int]) -> None:
            raise AssertionError

    manager.save(0, {"reader": Reader()})
    manager.wait_until_finished()
    cells[TARGET_DURABLE] = 1
    manager.save(1, {"reader": Reader()}, force=True)
    assert decided == [(0, NO_STEP), (1, 1)]


def test_it_has_decided_where_the_save_is_refused(
    manager: holdfast.CheckpointManager, cells: memoryview
) -> None:
    with pytest.raises(UnsupportedLeafError):
        manager.save(0, {"w": object()})
    assert cells[decided_cell(0)] == 0


def test_after_it_went_back_it_decides_of_those_steps_anew(
    manager: holdfast.CheckpointManager, cells: memoryview
) -> None:
    for step in range(4):
        manager.save(step, {"w": np.ones(3)})
    manager.wait_until_finished()
    manager.resume({"w": np.zeros(3)})
    assert cells[decided_cell(0)] == cells[step_cell(0)] == 2
