"""Failures and hours are counted over all attempts, also those of earlier agents."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from holdfast.coordination.messages import TargetKind
from holdfast.observe.events.schema import (
    AttemptStarted,
    Event,
    FirstStep,
    PeerSilent,
    PreemptionNoticed,
    RankPosition,
    StepProgress,
    TrainerLost,
)
from holdfast.observe.failure_history import FailureHistory, read_history
from holdfast.store.run_directory import RunDirectory
from tests.observe.events.written import at, written

DURABLE, RAM = TargetKind.DURABLE, TargetKind.RAM
LOST = TrainerLost(rank=0, pid=1, last_step=9)


def attempt(number: int, start: float, *ends: Event) -> list[Event]:
    """An hour of training from `start`, and its end."""
    events: list[Event] = [
        AttemptStarted(pid=1, processes=1),
        FirstStep(rank=0, step=0),
        StepProgress(ranks={0: RankPosition(step=5)}),
        *ends,
    ]
    times = [start, start, start + 3000, *(start + 3600 for _ in ends)]
    return [
        msgspec.structs.replace(event, time=at(secs), run_attempt=number)
        for event, secs in zip(events, times, strict=True)
    ]


RUN = [
    *attempt(1, 0, LOST),
    *attempt(2, 5000, PeerSilent(of_host="b", secs=10), LOST),
    *attempt(3, 10_000, PreemptionNoticed(rank=0, last_step=9), LOST),
    *attempt(4, 15_000, LOST, LOST),
]


def test_failures_count_once_by_kind_and_hours_are_those_of_training() -> None:
    history = FailureHistory()
    for event in RUN:
        history.note_event(event)
    assert history.counts == {"process": 2, "host": 1}
    assert history.hours == pytest.approx(4.0)


def test_each_tier_pays_for_the_failures_that_no_nearer_one_survives() -> None:
    history = FailureHistory()
    history.hours, history.counts = 88.0, {"process": 20, "host": 2}

    def per_hour(kind: TargetKind, *, ram: bool, copies: bool) -> float:
        return 3600 * history.per_sec(kind, has_own_ram=ram, has_copies=copies)

    assert per_hour(DURABLE, ram=False, copies=False) == pytest.approx(0.23)
    assert per_hour(DURABLE, ram=False, copies=True) == pytest.approx(0.23)
    assert per_hour(RAM, ram=True, copies=False) == pytest.approx(0.205)
    assert per_hour(DURABLE, ram=True, copies=False) == pytest.approx(0.025)
    assert per_hour(RAM, ram=True, copies=True) == pytest.approx(0.23)
    assert per_hour(DURABLE, ram=True, copies=True) == pytest.approx(0.005)


def test_the_history_of_a_host_is_read_up_to_the_start_of_its_agent(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        own = [event for event in RUN if event.run_attempt == number]
        written(tmp_path, *own, attempt=number)
    written(tmp_path, LOST, host="b")
    found = read_history(RunDirectory(tmp_path), "a", at(10**6))
    assert found.counts == {"process": 2, "host": 1}
    early = read_history(RunDirectory(tmp_path), "a", at(0) + timedelta(seconds=4000))
    assert (early.counts, early.hours) == ({"process": 1, "host": 0}, pytest.approx(1.0))
    total = FailureHistory()
    total.add_history(found)
    total.add_history(early)
    assert (total.counts["process"], total.hours) == (3, pytest.approx(5.0))
    assert read_history(RunDirectory(tmp_path / "none"), "a", at(0)).hours == 0.0
