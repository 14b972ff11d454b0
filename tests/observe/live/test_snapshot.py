"""What is shown of a run says where it stands, also while hosts do not answer."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from holdfast.coordination.survivability import Outlook, Standing
from holdfast.observe.live.snapshot import explained, view_of_run
from holdfast.observe.metrics.measures import RecentSteps, StepSpan
from holdfast.observe.reports.goodput import report_run
from holdfast.observe.reports.model import RunFailure
from holdfast.observe.run_status import HeldCheckpoint, JobHostStatus, JobStatus
from holdfast.observe.state_words import silence, survives

EMPTY = report_run("runs/a", [])
NEWEST = Standing(step=30, attempt=2, in_ram=True, durable=False, domains=2, survives=1)


def host(name: str, rank: int, problem: str = "") -> JobHostStatus:
    return JobHostStatus(
        host=name,
        domain=name,
        address=None,
        problem=problem,
        silent_secs=0.0,
        version="1",
        pid=1,
        ranks=(rank,),
        ram_bytes=None if problem else 5_000_000,
        ram_free_bytes=0,
        holds=()
        if problem
        else (HeldCheckpoint(step=30, attempt=2, own=(rank,), copies=(1 - rank,)),),
    )


JOB = JobStatus(
    attempt=2,
    leader="a",
    leader_answers=True,
    rank_count=2,
    newest=NEWEST,
    newest_in_ram=NEWEST,
    newest_durable=None,
    goes_on_from=(
        Outlook(lost_domains_max=1, step=30, attempt=2),
        Outlook(lost_domains_max=None, step=20, attempt=2),
    ),
    hosts=(host("a", 0), host("b", 1)),
)
STEPS = RecentSteps(spans=(StepSpan(ago_secs=0.1, step=31, steps=2, secs=0.2, phase="quiet"),))
FAILURE = RunFailure(
    time=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    at_secs=10.0,
    attempt=1,
    cause="host_lost",
    host="b",
    last_step=1200,
    steps_lost=7,
    secs_to_next_step=12.0,
    source="peer",
    sources={"peer": 10},
)


def test_a_training_is_shown_with_its_hosts_and_tiers() -> None:
    view = view_of_run("runs/a", EMPTY, JOB, steps=STEPS, durable=[10, 20], problems=[])
    assert (view.headline, view.attempt, view.step) == ("training, 2 processes", 2, 31)
    assert (view.newest, view.newest_step) == (
        "step 30, attempt 2: in the RAM of 2 failure domains",
        30,
    )
    assert view.survives == ("1 more lost host, from step 30", "any loss, from step 20")
    assert view.durable == (20, 10)
    first = view.hosts[0]
    assert (first.name, first.is_leading, first.ranks, first.memory) == (
        "a",
        True,
        "rank 0",
        "5.0 MB",
    )
    assert [(h.step, h.text) for h in first.holds] == [(30, "1 part + 1 copy")]
    assert first.holds_text == "step 30: 1 part + 1 copy"
    assert view.last_failure == ()


def test_a_host_that_does_not_answer_is_the_headline_and_is_explained() -> None:
    job = replace(JOB, hosts=(host("a", 0), host("b", 1, "not reached: Connection refused")))
    view = view_of_run("runs/a", EMPTY, job, steps=STEPS, durable=[], problems=[])
    assert view.headline == "1 host does not answer: b"
    assert view.last_failure[0] == (
        "Now: b has not answered for 0 s (not reached: Connection refused)."
    )
    assert "continues from step 30" in view.last_failure[1]
    assert view.hosts[1].holds == ()
    lost = silence(replace(job, newest=None))
    assert lost[-1] == "No checkpoint is complete on the hosts that answer."
    assert "leads" in silence(replace(job, leader_answers=False))[-1]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (replace(JOB, leader_answers=False), "unknown: the host that leads does not answer"),
        (replace(JOB, newest=None), "no checkpoint is complete yet"),
        (replace(JOB, goes_on_from=()), "no lost host"),
        (
            replace(JOB, goes_on_from=(Outlook(lost_domains_max=0, step=30, attempt=2),)),
            "no lost host but lost processes, from step 30",
        ),
        (
            replace(
                JOB,
                hosts=(replace(JOB.hosts[0], domain="rack 1"), JOB.hosts[1]),
                goes_on_from=(Outlook(lost_domains_max=2, step=30, attempt=2),),
            ),
            "2 more lost failure domains, from step 30",
        ),
    ],
)
def test_what_the_run_survives_is_said_in_words(job: JobStatus, expected: str) -> None:
    assert survives(job) == (expected,)


def test_a_failure_is_explained_with_its_cost() -> None:
    assert explained(FAILURE) == (
        "2026-01-02 03:04:05 UTC: host lost on b, in attempt 1, after step 1,200.",
        "7 steps had to be made again.",
        "The next step was finished 12 s later, from other hosts' RAM.",
    )
    waiting = replace(FAILURE, steps_lost=None, secs_to_next_step=None)
    assert explained(waiting)[-1] == "The run has not continued yet."
    assert explained(replace(FAILURE, steps_lost=0))[1] == "No step was lost."


def test_without_an_agent_the_page_says_so() -> None:
    view = view_of_run("runs/a", EMPTY, None, steps=None, durable=[], problems=["x"])
    assert (view.is_live, view.hosts, view.step) == (False, (), None)
    assert view.headline == "no events yet"
    assert view.problems == ("x",)


def test_no_goodput_is_shown_before_the_first_durations_are_known() -> None:
    report = replace(EMPTY, goodput=0.0, wall_secs=3.0)
    view = view_of_run("runs/a", report, JOB, steps=None, durable=[], problems=[])
    assert (view.goodput, view.goodput_text) == (None, "")
    view = view_of_run("a", replace(report, goodput=0.25), JOB, steps=None, durable=[], problems=[])
    assert view.goodput_text == "25.0 %"


def test_steps_that_cannot_be_listed_are_not_known() -> None:
    for durable, text in (((), "none"), (None, "not known"), ((7,), "step 7")):
        view = view_of_run("a", EMPTY, None, steps=None, durable=durable, problems=[])
        assert view.durable_text == text
