"""Checkpoints of several processes, written without any process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.adapt.numpy_state import NumpyFramework
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.saving.part_writer import write_part
from holdfast.store.disk import DiskStore
from holdfast.trainer.planning import Planner, Taking
from tests.attempts import checkpoint_id

RUN_ID = "0123456789abcdef0123456789abcdef"
TIME = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
STEP = 10


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def get_state(self) -> dict:
        return {"position": self.position, "seeds": list(range(self.position, self.position + 9))}

    def set_state(self, state: dict) -> None:
        self.position = state["position"]


def saved_by(
    count: int,
    directory: Path,
    state: Callable[[int], Any],
    metrics: Mapping[str, float] | None = None,
) -> str:
    """A run with one checkpoint of `count` processes, each of which has its `state`."""
    directory.mkdir()
    checkpoint = checkpoint_id(STEP)
    store = DiskStore(directory, SystemClock())
    create_run(store, str(directory), RUN_ID, TIME)
    start = AttemptStart(run_id=RUN_ID, origin=None, host="h", pid=1, time=TIME)
    begin_attempt(store, checkpoint.attempt, start)
    for rank in range(count):
        snapshot = NumpyFramework().snapshot(state(rank))
        taking = Taking(id=checkpoint, time=TIME, metrics=metrics)
        plan = Planner(RUN_ID, rank, count).plan(snapshot, taking)
        write_part(store, plan, snapshot.chunk_bytes)
    commit(store, checkpoint, count)
    return str(directory)
