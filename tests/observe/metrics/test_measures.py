"""Metrics count what the events of one host say, each thing once."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.observe.events.schema import (
    AttemptBranched,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSealed,
    CheckpointUploaded,
    Event,
    FirstStep,
    LeaderReplaced,
    ManagerOpened,
    PartSaved,
    PeerHeard,
    PeerSilent,
    PreemptionNoticed,
    RankPosition,
    RanksLost,
    ReplicasDiffer,
    StateRestored,
    TrainerLeft,
    TrainerLost,
    UploadFailed,
)
from holdfast.observe.metrics.measures import Measures
from holdfast.observe.metrics.metric_families import AgentMetrics, flat
from tests.trust.in_process import StepClock


class Counts:
    """Measures of a host, and what they come to."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.measures = Measures(self.clock)
        self.attempt = 0

    def begin(self, attempt: int, first_step: int, *, has_rank_0: bool = True) -> None:
        self.attempt = attempt
        if has_rank_0:
            self.note(AttemptStarted(pid=1, processes=1))
        self.note(ManagerOpened(rank=0, pid=1, process_secs=0, secs=0))
        self.note(FirstStep(rank=0, step=first_step))

    def note(self, *events: Event) -> None:
        for event in events:
            members: dict[str, Any] = {f: getattr(event, f) for f in event.__struct_fields__}
            self.measures.note_event(type(event)(**members | {"run_attempt": self.attempt}))

    def of(self, name: str) -> dict[str, float]:
        """The values above 0 of a metric, by label."""
        found = flat(AgentMetrics(run="r", host="h", families=self.measures.families({})))
        prefix = f"holdfast/{name}"
        return {
            key.removeprefix(prefix).lstrip("/"): value
            for key, value in found.items()
            if value and (key == prefix or key.startswith(prefix + "/"))
        }


LOST = TrainerLost(rank=0, pid=1, last_step=29)
ENDS: dict[str, tuple[tuple[Event, ...], str, bool]] = {
    "a process": ((LOST,), "lost", True),
    "two processes of one attempt": ((LOST, LOST), "lost", True),
    "a process elsewhere": ((RanksLost(of_host="b", ranks=(1,), closed=False), LOST), "lost", True),
    "a host": ((PeerSilent(of_host="b", secs=10), LOST), "host_lost", True),
    "the leader's host": ((LeaderReplaced(leader="a", before="b"), LOST), "host_lost", True),
    "a host that is back": (
        (PeerSilent(of_host="b", secs=10), PeerHeard(of_host="b"), LOST),
        "lost",
        True,
    ),
    "a preempted one": (
        (PreemptionNoticed(rank=0, last_step=29), TrainerLeft(rank=0, pid=1, last_step=29)),
        "preempted",
        True,
    ),
    "a closed one": ((TrainerLeft(rank=0, pid=1, last_step=29),), "closed", False),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_an_end_a_restart_and_its_lost_steps_have_one_cause(
    ends: tuple[tuple[Event, ...], str, bool],
) -> None:
    events, cause, is_failure = ends
    counts = Counts()
    counts.begin(1, 0)
    counts.note(*events)
    assert counts.of("failures_total") == ({cause: 1} if is_failure else {})
    counts.begin(2, 20)
    assert counts.of("restarts_total") == {cause: 1}
    assert counts.of("lost_steps_total") == {cause: 10}
    counts.note(*events)
    counts.begin(3, 30)
    assert counts.of("restarts_total") == {cause: 2}
    assert counts.of("lost_steps_total") == {cause: 10}


def test_the_first_attempt_is_no_restart_and_one_after_an_unseen_end_is_unknown() -> None:
    counts = Counts()
    counts.begin(1, 0)
    assert counts.of("restarts_total") == {}
    counts = Counts()
    counts.begin(4, 100)
    assert counts.of("restarts_total") == {"unknown": 1}
    assert counts.of("lost_steps_total") == {}


def test_a_host_without_rank_0_counts_each_failure_and_no_restart() -> None:
    counts = Counts()
    for attempt in (1, 2, 3):
        counts.begin(attempt, 0, has_rank_0=False)
        counts.note(LOST)
    assert counts.of("failures_total") == {"lost": 3}
    assert counts.of("restarts_total") == {}


def test_going_back_to_an_older_step_is_a_restart_with_lost_steps() -> None:
    counts = Counts()
    counts.begin(1, 0)
    counts.measures.note_position(0, RankPosition(step=40))
    counts.measures.note_steps("quiet", 40, 40, 4.0)
    counts.attempt = 2
    counts.note(AttemptBranched(origin_step=30), FirstStep(rank=0, step=31))
    assert counts.of("restarts_total") == {"went_back": 1}
    assert counts.of("lost_steps_total") == {"went_back": 10}


def test_steps_count_with_their_durations_and_inflation_is_beyond_quiet_ones() -> None:
    counts = Counts()
    measures = counts.measures
    for step in range(10):
        measures.note_steps("quiet", step, 1, 0.1)
    measures.note_steps("sealing", 11, 2, 0.4)
    measures.note_steps("writing", 12, 1, 0.15)
    measures.note_inflation({"sealing": 0.2, "writing": 0.05}, quiet_secs=0.1)
    counts.note(CheckpointSealed(step=11, attempt=1, tier="ram"))
    measures.note_position(0, RankPosition(step=12, blocked_secs=0.05))
    assert counts.of("steps_total") == {"": 13}
    assert counts.of("step_seconds")["count"] == 13
    assert counts.of("quiet_step_seconds") == {"": pytest.approx(0.1)}
    found = counts.of("step_inflation_seconds_total")
    assert found == {"ram": pytest.approx(0.15), "durable": pytest.approx(0.05)}
    measures.note_inflation({"sealing": -0.09}, quiet_secs=0.1)
    assert counts.of("step_inflation_seconds_total") == found, "a counter never falls"


def test_waits_and_blocked_time_grow_over_managers_and_only_the_lowest_rank_counts() -> None:
    counts = Counts()
    note = counts.measures.note_position
    note(0, RankPosition(step=1, blocked_secs=1.0, waiting_secs={"data": 2.0}))
    note(1, RankPosition(step=1, blocked_secs=50.0, waiting_secs={"data": 50.0}))
    note(
        0,
        RankPosition(
            step=1, blocked_secs=1.5, waiting_secs={"data": 2.0}, waiting_after_secs={"data": 1.0}
        ),
    )
    assert counts.of("save_blocked_seconds_total") == {"": 1.5}
    assert counts.of("waiting_seconds_total") == {"data": 3.0}
    counts.measures.forget_rank(0)
    counts.measures.forget_rank(1)
    note(0, RankPosition(step=5, blocked_secs=0.25))
    assert counts.of("save_blocked_seconds_total") == {"": 1.75}


def test_checkpoints_count_by_tier_and_grow_old() -> None:
    counts = Counts()
    counts.begin(1, 0)
    counts.clock.sleep(5)
    assert counts.of("checkpoint_age_seconds") == {"durable": 5.0}
    counts.note(
        PartSaved(
            step=1,
            attempt=1,
            rank=0,
            tier="ram",
            blocked_secs=0,
            secs=0.2,
            bytes=70,
            reused_bytes=30,
        ),
        CheckpointSealed(step=1, attempt=1, tier="ram"),
        CheckpointCommitted(step=1, attempt=1, bytes=70, secs=2.0),
        CheckpointCommitted(step=0, attempt=1, by="recovery"),
        CheckpointUploaded(step=1, attempt=1, bytes=60, secs=4.0),
        UploadFailed(step=2, attempt=1, reason="no"),
        CheckpointFailed(step=2, attempt=1, reason="full"),
        StateRestored(step=1, attempt=1, rank=0, sources={"ram": 1, "peer": 9}, secs=3.0),
    )
    counts.clock.sleep(2)
    assert counts.of("checkpoint_age_seconds") == {"durable": 2.0, "ram": 2.0, "remote": 2.0}
    assert counts.of("checkpoint_committed_total") == {"ram": 1, "durable": 1, "remote": 1}
    assert counts.of("checkpoint_written_bytes_total") == {
        "ram": 70,
        "durable": 70,
        "remote": 60,
    }
    assert counts.of("checkpoint_reused_bytes_total") == {"": 30}
    assert counts.of("commit_duration_seconds")["durable/mean"] == 2.0
    assert counts.of("durable_errors_total") == {"save": 1, "upload": 1}
    assert counts.of("restore_seconds") == {"peer/count": 1.0, "peer/mean": 3.0}


def test_what_trainers_write_to_the_durable_tier_themselves_counts_with_their_time() -> None:
    counts = Counts()
    counts.begin(1, 0)
    counts.note(
        PartSaved(step=1, attempt=1, rank=0, tier="durable", blocked_secs=0, secs=0.5, bytes=70),
        CheckpointCommitted(step=1, attempt=1, bytes=70),
    )
    assert counts.of("commit_duration_seconds")["durable/mean"] == 0.5
    assert counts.of("checkpoint_written_bytes_total")["durable"] == 70


def test_recent_steps_are_kept_in_spans_with_their_age() -> None:
    counts = Counts()
    for step in range(100):
        counts.measures.note_steps("quiet" if step < 90 else "writing", step, 1, 0.1)
        counts.clock.sleep(0.1)
    spans = counts.measures.recent_steps().spans
    assert [span.steps for span in spans] == [5] * 20
    assert [span.phase for span in spans[-3:]] == ["quiet", "writing", "writing"]
    assert spans[-1].step == 99
    assert (spans[-1].ago_secs, spans[0].ago_secs) == (pytest.approx(0.1), pytest.approx(9.6))


def test_each_difference_of_replicas_counts() -> None:
    counts = Counts()
    counts.begin(1, 0)
    difference = ReplicasDiffer(
        step=5,
        attempt=1,
        rank=1,
        owner=0,
        arrays=("w",),
        start_bytes=0,
        stop_bytes=8,
        digest="a",
        owner_digest="b",
        blocks=1,
        checked=4,
        holders=(0, 1),
    )
    counts.note(difference, difference)
    assert counts.of("replica_differences_total") == {"": 2}
