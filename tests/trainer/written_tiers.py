"""A run with a remote tier in a second directory, written and opened without an agent.

What agents would have copied is written directly. `open` does to both tiers what a start does
before it joins an agent.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.adapt.contract import OwnProcess
from holdfast.adapt.numpy_state import NumpyFramework
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import (
    AttemptStart,
    begin_attempt,
    newest_number,
)
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.lifecycle.run import read_run
from holdfast.engine.reading.view import View, view_of
from holdfast.engine.saving.part_writer import write_part
from holdfast.engine.tiers.shared_attempts import begin_in_both
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.records import RunRecord
from holdfast.store.contract import REMOTE
from holdfast.store.durable import DurableStore
from holdfast.store.location import open_durable
from holdfast.trainer.opening.opening import OpenRun, open_run
from holdfast.trainer.planning import Planner, Taking
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.engine.making import TIME
from tests.trainer.tiers import Places
from tests.trainer.two_tier_trainer import state_of

CLOCK = SystemClock()


class WrittenTiers(Places):
    """The two places of a run. Each call of `train` is one attempt."""

    def open(self, *, takeover: bool = False) -> OpenRun:
        """Open the run as a start with both tiers does."""
        return opened(self.fast, str(self.remote), takeover=takeover)

    def train(self, *steps: int, copied: int | None = None) -> AttemptId:
        """Start with both tiers and save the steps; `copied` of them get to the remote one."""
        self.open()
        fast, remote = stores = self.stores()
        attempt = next_attempt(fast, steps)
        assert begin_in_both(fast, remote, attempt, start(fast, self.newest())) is not None
        for step in steps:
            write(fast, CheckpointId(step, attempt))
        for step in steps if copied is None else steps[:copied]:
            write(remote, CheckpointId(step, attempt))
        for store in stores:
            store.home.release()
        return attempt

    def newest(self) -> CheckpointId | None:
        return newest_in(self.view())

    def view(self) -> View:
        """What a start sees of both tiers."""
        fast, remote = self.stores()
        return view_of([fast, remote], fast)

    def stores(self) -> tuple[DurableStore, DurableStore]:
        return open_durable(str(self.fast), CLOCK), open_durable(
            str(self.remote), CLOCK, tier=REMOTE
        )


def opened(place: Path, remote: str | None = None, *, takeover: bool = False) -> OpenRun:
    """Open a run as a start does; nothing is kept open."""
    run = open_run(place, Rendezvous(OwnProcess(), CLOCK), CLOCK, remote, takeover=takeover)
    for store in (run.durable, run.remote):
        if store is not None:
            store.home.release()
    return run


def train_alone(place: Path, *steps: int) -> AttemptId:
    """Start in one place, as if it were a run without a remote tier, and save the steps."""
    store = opened(place).durable
    attempt = next_attempt(store, steps)
    origin = newest_in(view_of([store], store))
    assert begin_attempt(store, attempt, start(store, origin)) is not None
    for step in steps:
        write(store, CheckpointId(step, attempt))
    store.home.release()
    return attempt


def newest_in(view: View) -> CheckpointId | None:
    return view.newest_sound()


def next_attempt(store: DurableStore, steps: tuple[int, ...]) -> AttemptId:
    return AttemptId.of_start(newest_number(store) + 1, f"{store.home.location_text} {steps}")


def start(store: DurableStore, origin: CheckpointId | None) -> AttemptStart:
    return AttemptStart(
        run_id=record_of(store).run_id, origin=origin, host="host-a", pid=1, time=CLOCK.now()
    )


def record_of(store: DurableStore) -> RunRecord:
    return read_run(store, store.home.location_text)


def write(store: DurableStore, checkpoint: CheckpointId) -> None:
    """Write and commit a checkpoint of one process, whose state is `state_of` its step.

    In each place it has the same bytes, as a copy has.
    """
    snapshot = NumpyFramework().snapshot(state_of(checkpoint.step))
    planner = Planner(record_of(store).run_id, rank=0, count=1)
    plan = planner.plan(snapshot, Taking(id=checkpoint, time=TIME, metrics=None))
    write_part(store, plan, snapshot.chunk_bytes)
    commit(store, checkpoint, 1)
    snapshot.release()
