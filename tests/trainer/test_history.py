"""The events of a run have what a report of its time needs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from holdfast import CheckpointManager, RamTier
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import (
    AttemptBranched,
    AttemptStarted,
    CheckpointCommitted,
    Event,
    FirstStep,
    ManagerOpened,
    PartSaved,
    StateRestored,
    StepProgress,
    TrainerLeft,
)
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from tests.hosts import Host, wait_until

SIZE_BYTES = 800_000
WAIT_SECS = 0.01


def train(run: Path, steps: int, back_to: int | None = None) -> tuple[float, float]:
    """Train to a step; return the durations of opening, and of all calls of `save` and `close`."""
    started = time.monotonic()
    with CheckpointManager(
        run,
        framework="numpy",
        save_decision_policy=FixedIntervalPolicy(2),
        ram=RamTier(linger_secs=5),
    ) as manager:
        opening_secs, saving_secs = time.monotonic() - started, 0.0
        state = {"frozen": np.ones(SIZE_BYTES // 4), "w": np.zeros(SIZE_BYTES // 8)}
        start, state = manager.resume(state, step=back_to)
        for step in range(start, steps):
            state["w"] = state["w"] + 1
            began = time.monotonic()
            manager.save(step, state)
            saving_secs += time.monotonic() - began
            with manager.waiting("data"):
                time.sleep(WAIT_SECS)
        began = time.monotonic()
    return opening_secs, saving_secs + time.monotonic() - began


def test_a_run_of_three_starts(one_host: Host, tmp_path: Path, monkeypatch) -> None:
    for name, value in one_host.environment.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    opening_secs, saving_secs = train(run, 11)
    train(run, 14)
    train(run, 11, back_to=8)
    wait_until(lambda: len(read_events(run, TrainerLeft)) == 3)

    started = read_events(run, AttemptStarted)
    assert [one.run_attempt for one in started] == [1, 2, 3]
    assert [(one.origin_step, one.origin_attempt) for one in started] == [
        (None, None),
        (10, 1),
        (12, 2),
    ]
    (branched,) = read_events(run, AttemptBranched)
    assert (branched.run_attempt, branched.origin_step, branched.origin_attempt) == (4, 8, 1)

    opened = read_events(run, ManagerOpened)
    assert 0 < opened[0].secs <= opening_secs
    assert 0 < opened[0].process_secs < opened[1].process_secs
    firsts = read_events(run, FirstStep)
    assert [(one.step, one.run_attempt) for one in firsts] == [(0, 1), (11, 2), (9, 4)]
    assert all(one.time >= two.time for one, two in zip(firsts, opened, strict=True))
    restored = read_events(run, StateRestored)
    assert [(one.step, one.rank) for one in restored] == [(10, 0), (8, 0)]
    assert all(sum(one.sources.values()) == 3 * SIZE_BYTES for one in restored)

    left = read_events(run, TrainerLeft)
    assert [one.last_step for one in left] == [10, 13, 10]
    assert 0 < left[0].blocked_secs <= saving_secs
    parts = read_events(run, PartSaved)
    assert [one.step for one in parts] == [0, 2, 4, 6, 8, 10, 12, 10]
    assert all(0 < one.blocked_secs <= one.secs for one in parts)
    # The trainer rounds its sum to 0.1 ms.
    assert sum(one.blocked_secs for one in parts[:6]) <= left[0].blocked_secs + 1e-4
    # After a few saves the frozen array is known to be unchanged.
    assert parts[0].bytes >= 3 * SIZE_BYTES
    assert parts[5].bytes < 1.1 * SIZE_BYTES
    assert parts[5].reused_bytes >= 2 * SIZE_BYTES
    assert {one.step_and_attempt for one in read_events(run, CheckpointCommitted)} == {
        one.step_and_attempt for one in parts
    }
    progress = read_events(run, StepProgress)
    assert progress[-1].ranks[0].step == 10
    assert progress[0].ranks[0].waiting_secs["data"] >= 9 * WAIT_SECS
    # After the last step the trainer waited and closed, before this was recorded.
    assert (progress[0].ranks[0].step_age_secs or 0) >= WAIT_SECS
    every: list[Event] = read_events(run, Event)
    assert all(one.host == one_host.name for one in every)
