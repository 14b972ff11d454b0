"""The time of a run is divided exactly, from events that tests write."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from holdfast.observe.events.reader import EventReader
from holdfast.observe.events.schema import (
    AttemptBranched,
    AttemptFenced,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointProtected,
    CheckpointUploaded,
    Event,
    FirstStep,
    ManagerOpened,
    PartSaved,
    PeerSilent,
    RankPosition,
    RanksLost,
    StateRestored,
    StepProgress,
    StepTimes,
    TrainerLeft,
    TrainerLost,
)
from holdfast.observe.reports.advice import advise_run
from holdfast.observe.reports.goodput import report_run
from holdfast.observe.reports.model import RunReport
from holdfast.observe.reports.page import page
from tests.observe.events.written import at


def happened(secs: float, event: Event, attempt: int = 1, host: str = "a") -> Event:
    """An event of a host whose monotonic clock is 5000 at the begin."""
    return msgspec.structs.replace(
        event, time=at(secs), uptime_secs=5000 + secs, host=host, run_attempt=attempt
    )


def progress(
    step: int, age: float, blocked: float = 0.0, after: float = 0.0, data: float = 0.0, **times
) -> Event:
    waiting = {"data": data} if data else {}
    position = RankPosition(
        step=step,
        step_age_secs=age,
        blocked_secs=blocked,
        blocked_after_secs=after,
        waiting_secs=waiting,
    )
    return StepProgress(ranks={0: position}, **times)


def steps(count: int, secs: float) -> StepTimes:
    return StepTimes(steps=count, secs=count * secs, median_secs=secs)


def killed_once() -> list[Event]:
    """Steps of 1 s; 0 to 39, killed; continued after step 29, to step 49.

    Of the first attempt: process at 0, opened at 5, first step at 10, in which it compiles. Between
    the steps 0 and 39: 29 quiet steps, 5 of 1.5 s during saves, which block for 1 s in total, 5 of
    1.2 s during writes, and waits for 4 s. The last step ends at 56.5; it is killed at 57. The
    second: process at 60, opened at 63, restored in 1 s, first step (30) at 68, last (49) at 87,
    closing takes 2 s.
    """
    return [
        happened(5, ManagerOpened(rank=0, pid=1, process_secs=3, secs=2)),
        happened(5, AttemptStarted(pid=1, processes=1)),
        happened(10, FirstStep(rank=0, step=0)),
        happened(
            57,
            progress(
                39,
                0.5,
                blocked=1,
                data=4,
                quiet=steps(29, 1.0),
                sealing=steps(5, 1.5),
                writing=steps(5, 1.2),
                inflation_secs={"sealing": 2.5, "writing": 1.0},
            ),
        ),
        happened(57, TrainerLost(rank=0, pid=1, last_step=39, blocked_secs=1)),
        happened(63, ManagerOpened(rank=0, pid=2, process_secs=2, secs=1), 2),
        happened(63, AttemptStarted(pid=2, processes=1, origin_step=29, origin_attempt=1), 2),
        happened(
            65,
            StateRestored(step=29, attempt=1, rank=0, sources={"ram": 70, "durable": 30}, secs=1),
            2,
        ),
        happened(68, FirstStep(rank=0, step=30), 2),
        happened(89, progress(49, 2, blocked=2, after=2, quiet=steps(19, 1.0)), 2),
        happened(89, TrainerLeft(rank=0, pid=2, last_step=49, blocked_secs=2), 2),
    ]


def assert_exact(found: RunReport) -> None:
    """Durations add up, in the run, in each attempt and in each slice."""
    for whole in (found, *found.attempts):
        added_us = sum(round(secs * 1e6) for secs in whole.categories.values())
        assert added_us == round(whole.wall_secs * 1e6)
        restart_us = sum(round(secs * 1e6) for secs in whole.restart.values())
        assert restart_us == round(whole.categories["restart"] * 1e6)
    reached_us = 0
    for piece in found.timeline:
        assert round(piece.start_secs * 1e6) == reached_us
        reached_us += sum(round(secs * 1e6) for secs in piece.categories.values())
    assert reached_us == round(found.wall_secs * 1e6)


def test_a_killed_run_is_divided_as_it_was_made() -> None:
    found = report_run("run", killed_once())
    assert_exact(found)
    assert found.wall_secs == 89
    assert found.categories == {
        # 40 steps of the first attempt; 10 of the second.
        "productive": pytest.approx(1 + 46.5 - 4 - 1 - 2.5 + 10),
        "redone": 10,
        # 10 s to the first step and 11.5 s to the next, less one step each.
        "restart": 9 + 10.5,
        "blocked": 1 + 2,
        # 5 saves lengthened steps by 0.5 s, of which 1 s was blocked; 5 writes by 0.2 s.
        "inflation": 2.5,
        "waiting": 4,
        "compiling": 0,
        "unknown": 0,
    }
    assert found.restart == {
        "down": 0.5 + 3,
        "startup": 3 + 2,
        "opening": 2 + 1,
        "restore": 1,
        "first_step": 4 + 3,
    }
    assert found.steps == 50
    (failure,) = found.failures
    assert (failure.cause, failure.host, failure.steps_lost) == ("lost", "a", 10)
    assert (failure.secs_to_next_step, failure.source) == (11, "ram")
    assert [one.end for one in found.attempts] == ["lost", "closed"]


def test_compilations_are_a_category_before_the_first_step_and_between_steps() -> None:
    events = killed_once()
    first, second = 2, 9
    waits = {"compilation": 3.0}
    events[first] = msgspec.structs.replace(events[first], waiting_secs=waits)
    position = events[second].ranks[0]
    later = msgspec.structs.replace(position, waiting_secs={"compilation": 8.0, "data": 1.0})
    events[second] = msgspec.structs.replace(events[second], ranks={0: later})
    found = report_run("run", events)
    assert_exact(found)
    assert found.categories["compiling"] == 3 + 8
    assert found.waiting == {"data": 4 + 1}
    assert found.categories["waiting"] == 5
    assert found.restart["first_step"] == 4 + 3 - 3
    assert any("programs were compiled for 11 s" in line for line in advise_run(found).observed)


def test_a_report_of_the_first_seconds_has_no_goodput_yet() -> None:
    found = report_run("run", killed_once()[:3])
    assert found.goodput == 0
    text = page([found]).decode()
    assert "<dd>–</dd>" in text
    assert "<dd>0.0 %</dd>" not in text


def went_back_after_a_kill() -> list[Event]:
    """Killed after step 39 with checkpoint 34; the restart opens there and goes back to step 20."""
    return [
        *killed_once()[:5],
        happened(63, ManagerOpened(rank=0, pid=2, process_secs=2, secs=1), 2),
        happened(63, AttemptStarted(pid=2, processes=1, origin_step=34, origin_attempt=1), 2),
        happened(64, AttemptBranched(origin_step=20, origin_attempt=1), 3),
        happened(68, FirstStep(rank=0, step=21), 3),
        happened(89, progress(40, 2, quiet=steps(19, 1.0)), 3),
        happened(89, TrainerLeft(rank=0, pid=2, last_step=40), 3),
    ]


def test_a_failure_is_charged_with_its_own_lost_steps_and_a_going_back_with_the_others() -> None:
    found = report_run("run", went_back_after_a_kill())
    assert_exact(found)
    charged = [(one.cause, one.last_step, one.steps_lost) for one in found.failures]
    assert charged == [("lost", 39, 5), ("went_back", 34, 14)]


def test_an_attempt_that_was_taken_over_ends_where_its_successor_begins() -> None:
    events = [one for one in killed_once() if not isinstance(one, TrainerLost)]
    fenced = happened(70, AttemptFenced(by_attempt=2, reason="taken over"))
    left = happened(71, TrainerLeft(rank=0, pid=1, last_step=39))
    found = report_run("run", [*events, fenced, left])
    assert_exact(found)
    assert [(one.cause, one.at_secs) for one in found.failures] == [("fenced", 63)]
    assert found.attempts[1].wall_secs == 89 - 63


def test_a_save_proves_its_step_where_no_agent_was_left_to_report_it() -> None:
    begin, rest = killed_once()[:3], killed_once()[5:]
    begin.append(happened(50, progress(30, 0, quiet=steps(30, 1.0))))
    commit = happened(56, CheckpointCommitted(step=37, attempt=1, bytes=9, secs=1))
    found = report_run("run", [*begin, commit, *rest])
    assert [(one.cause, one.last_step, one.steps_lost) for one in found.failures] == [
        ("unseen", 37, 8)
    ]
    assert any("after step 37 is not known" in note for note in found.notes)
    assert not any("finished no step" in note for note in found.notes)


def test_an_attempt_whose_saves_are_known_has_not_finished_no_step() -> None:
    events = [*killed_once(), happened(90, AttemptStarted(pid=3, processes=1), 3)]
    assert "attempt 3 finished no step" in report_run("run", events).notes
    saved = happened(95, CheckpointCommitted(step=60, attempt=3, bytes=9, secs=1), 3)
    (note,) = (n for n in report_run("run", [*events, saved]).notes if "attempt 3" in n)
    assert note == "attempt 3 saved step 60; the times of its steps are not known"


def test_attempts_without_events_are_noted_also_before_the_first_one_that_has_some() -> None:
    events = [
        msgspec.structs.replace(one, run_attempt=one.run_attempt + 3) for one in killed_once()
    ]
    assert "there are no events of attempts 1 to 3" in report_run("run", events).notes
    later = happened(90, AttemptStarted(pid=3, processes=1), 7)
    assert "there are no events of attempt 6" in report_run("run", [*events, later]).notes


def test_a_clock_that_is_set_changes_no_duration_and_is_noted() -> None:
    changed = [
        msgspec.structs.replace(event, time=event.time + timedelta(hours=3 if index > 5 else 0))
        for index, event in enumerate(killed_once())
    ]
    right, found = report_run("run", killed_once()), report_run("run", changed)
    assert found.wall_secs == right.wall_secs
    assert found.categories == right.categories
    assert len(found.notes) == 1
    assert "clock of host a was set forward by 10800 s" in found.notes[0]


def test_steps_that_no_event_explains_are_unknown() -> None:
    events = killed_once()[:3]
    events += [happened(100, progress(10, 60, quiet=steps(10, 1.0)))]
    events += [happened(700, progress(20, 80, quiet=steps(10, 1.0)))]
    found = report_run("run", events)
    assert_exact(found)
    # Ten steps took 30 s, and ten more 580 s.
    assert found.categories["productive"] == 1 + 20
    assert found.categories["unknown"] == 20 + 570 + 80
    assert found.attempts[0].end == "open"


def test_what_an_attempt_did_after_its_successor_began_is_left_out() -> None:
    events = killed_once()
    late = happened(80, progress(60, 0, quiet=steps(20, 1.0)))
    found = report_run("run", [*events, late])
    assert_exact(found)
    assert found.categories == report_run("run", events).categories
    assert any("attempt 1 went on for 17 s after attempt 2" in note for note in found.notes)


def test_a_lost_host_is_the_cause_that_another_host_reports() -> None:
    lost = happened(57.5, RanksLost(of_host="b", ranks=(1,), closed=False))
    stopped = [
        event if not isinstance(event, TrainerLost) else happened(58, event)
        for event in killed_once()
    ]
    found = report_run("run", [*stopped, lost])
    assert_exact(found)
    assert [(one.cause, one.host) for one in found.failures] == [("host_lost", "b")]


def two_hosts_killed(*ends: Event) -> RunReport:
    """Rank 1 is on host b, which opens its manager and reports nothing after that."""
    other = happened(5, ManagerOpened(rank=1, pid=9, process_secs=3, secs=2), 1, "b")
    return report_run("r", [*killed_once()[:5], other, *ends, *killed_once()[5:]])


def test_a_host_that_reports_no_end_is_lost_and_the_others_processes_ended_for_it() -> None:
    found = two_hosts_killed()
    assert [(f.cause, f.host, f.steps_lost) for f in found.failures] == [("host_lost", "b", 10)]
    assert_exact(found)
    silent = happened(56.8, PeerSilent(of_host="b", secs=10), 1, "a")
    assert [f.at_secs for f in two_hosts_killed(silent).failures] == [pytest.approx(56.8)]


@pytest.mark.parametrize(
    "end",
    [
        TrainerLost(rank=1, pid=9, last_step=39),
        TrainerLeft(rank=1, pid=9, last_step=39),
    ],
)
def test_a_host_that_reports_an_end_is_not_lost(end: Event) -> None:
    found = two_hosts_killed(happened(56.9, end, 1, "b"))
    assert [f.cause for f in found.failures] == ["lost"]


@pytest.mark.parametrize("kept", range(12))
def test_a_report_of_cut_off_events_adds_up(kept: int) -> None:
    assert_exact(report_run("run", killed_once()[:kept]))
    assert_exact(report_run("run", killed_once()[kept:]))


def test_lines_that_cannot_be_read_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    lines = [msgspec.json.encode(event) for event in killed_once()]
    lines[3] = lines[3].replace(b'"version":1', b'"version":9')
    lines[-1] = lines[-1][:40]
    (folder / "a-run.000000001.jsonl").write_bytes(b"\n".join(lines))
    found = report_run("run", EventReader(tmp_path).read())
    assert_exact(found)
    assert sum("left out" in note for note in found.notes) == 2
    assert any("version 9" in note for note in found.notes)


def test_checkpoints_count_once_and_have_intervals() -> None:
    commits = [
        happened(secs, CheckpointCommitted(step=secs, attempt=1, bytes=100, secs=0.5), 1, host)
        for secs in (12, 16, 26)
        for host in ("a", "b")
    ]
    found = report_run("run", [*killed_once(), *commits]).tiers["durable"]
    assert (found.checkpoints, found.bytes, found.secs) == (3, 300, 0.5)
    assert found.intervals.values_secs == [4, 10]
    assert (found.intervals.p50_secs, found.intervals.max_secs) == (4, 10)


def test_parts_that_trainers_wrote_to_the_durable_tier_themselves_have_its_time() -> None:
    part = PartSaved(step=1, attempt=1, rank=0, tier="durable", blocked_secs=0, secs=3, bytes=9)
    commit = CheckpointCommitted(step=1, attempt=1, bytes=9)
    found = report_run("run", [*killed_once(), happened(12, part), happened(12, commit)]).tiers
    assert found["durable"].secs == 3


def test_a_cost_is_not_known_before_steps_can_be_compared() -> None:
    commit = happened(12, CheckpointCommitted(step=0, attempt=1, bytes=100, secs=0.5))
    before = report_run("run", [*killed_once()[:3], commit]).tiers["durable"]
    assert before.cost_secs is None
    assert report_run("run", [*killed_once(), commit]).tiers["durable"].cost_secs is not None


def test_requests_and_bytes_of_peers_are_summed_over_agents_that_count_from_their_start() -> None:
    def counted(secs: float, requests: int, pulled: int, host: str = "a") -> Event:
        event = StepProgress(
            ranks={0: RankPosition(step=5)}, durable_requests=requests, pulled_bytes=pulled
        )
        return happened(secs, event, 1, host)

    tiers = report_run(
        "r",
        [
            happened(5, ManagerOpened(rank=0, pid=1, process_secs=3, secs=2)),
            happened(10, FirstStep(rank=0, step=0)),
            happened(11, CheckpointProtected(step=1, attempt=1)),
            happened(12, CheckpointCommitted(step=1, attempt=1, bytes=9, secs=1)),
            happened(15, CheckpointUploaded(step=1, attempt=1, bytes=8, secs=2)),
            counted(20, 10, 100),
            counted(20, 3, 0, "b"),
            counted(30, 25, 300),
            # Another agent on the same host.
            counted(40, 4, 50),
        ],
    ).tiers
    assert tiers["durable"].requests == 25 + 3 + 4
    assert tiers["peer"].bytes == 300 + 50
    assert (tiers["durable"].bytes, tiers["peer"].requests) == (9, None)
    assert (tiers["remote"].bytes, tiers["remote"].secs) == (8, 2.0)


def test_names_in_a_page_are_text() -> None:
    hostile = "<script>alert(1)</script>"
    events = [msgspec.structs.replace(event, host=hostile) for event in killed_once()]
    text = page([report_run(f"/runs/{hostile}", events)]).decode()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
