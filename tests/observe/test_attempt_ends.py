"""One fold finds why an attempt has ended, from the events of one host or of all."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.observe.attempt_ends import AttemptEnds, EndOfAttempt
from holdfast.observe.events.schema import (
    AttemptFenced,
    Event,
    LeaderReplaced,
    ManagerOpened,
    PeerHeard,
    PeerSilent,
    PreemptionNoticed,
    RanksLost,
    TrainerLeft,
    TrainerLost,
)

LOST = TrainerLost(rank=0, pid=1, last_step=9)
LEFT = TrainerLeft(rank=0, pid=1, last_step=9)
FAILED = TrainerLeft(rank=0, pid=1, last_step=9, after_error=True)
NOTICE = PreemptionNoticed(rank=0)
FENCED = AttemptFenced(by_attempt=2, reason="")
SILENT = PeerSilent(of_host="b", secs=10)
LOST_ON_B = RanksLost(of_host="b", ranks=(1,), closed=False)
LEFT_ON_B = RanksLost(of_host="b", ranks=(1,), closed=True)
OPENED = ManagerOpened(rank=0, pid=1, process_secs=0, secs=0)


def on(host: str, event: Event) -> Event:
    return msgspec.structs.replace(event, host=host, run_attempt=1)


def end(events: tuple[Event, ...], *, sees_all: bool) -> tuple[str, str, int] | None:
    """Cause, host and time of the end; the events are a second apart."""
    fold = EndOfAttempt(sees_all=sees_all)
    for number, event in enumerate(events):
        fold.note_event(event if event.host else on("a", event), number)
    found = fold.end()
    return (found.cause, found.host, found.time_us) if found is not None else None


B_LOST, B_LEFT, B_OPENED = on("b", LOST), on("b", LEFT), on("b", OPENED)

PEACEFUL = ("", "closed", "exception")
CASES: dict[str, tuple[tuple[Event, ...], object, object]] = {
    "nothing": ((OPENED,), None, None),
    "a process": ((OPENED, LOST, LOST), ("lost", "a", 1), ("lost", "a", 1)),
    "all closed": ((LEFT, LEFT), ("closed", "a", 1), ("closed", "a", 1)),
    "an exception": ((FAILED, LEFT), ("exception", "a", 0), ("exception", "a", 0)),
    "an exception that follows a loss": ((FAILED, LOST), ("lost", "a", 1), ("lost", "a", 1)),
    "an exception after a notice": (
        (NOTICE, FAILED),
        ("preempted", "a", 1),
        ("preempted", "a", 1),
    ),
    "one closed and one lost": ((LEFT, LOST), ("lost", "a", 1), ("lost", "a", 1)),
    "a notice": ((NOTICE,), None, None),
    "preempted": ((NOTICE, LEFT, LOST), ("preempted", "a", 1), ("preempted", "a", 1)),
    "a notice after the loss": ((LOST, NOTICE, LEFT), ("lost", "a", 0), ("lost", "a", 0)),
    "taken over": ((FENCED, LOST), ("fenced", "a", 0), ("fenced", "a", 0)),
    "lost, then replaced": ((LOST, FENCED), ("lost", "a", 0), ("lost", "a", 0)),
    "others closed": ((LEFT_ON_B, LEFT), ("closed", "a", 1), ("closed", "a", 1)),
    # The events of all hosts show whether b has reported its end, and those of one host do not.
    "a process elsewhere": ((LOST_ON_B, LOST), ("lost", "b", 0), ("host_lost", "b", 0)),
    "a process elsewhere, as b reports": (
        (LOST_ON_B, B_LOST, LOST),
        ("lost", "b", 0),
        ("lost", "b", 0),
    ),
    "a silent host": (
        (OPENED, B_OPENED, SILENT, LOST),
        ("host_lost", "b", 3),
        ("host_lost", "b", 2),
    ),
    "a host that reports nothing more": (
        (OPENED, B_OPENED, LOST),
        ("lost", "a", 2),
        ("host_lost", "b", 2),
    ),
    "a host that closed": ((OPENED, B_OPENED, B_LEFT, LOST), ("lost", "a", 3), ("lost", "a", 3)),
    "the leader's host": (
        (OPENED, B_OPENED, LeaderReplaced(leader="a", before="b"), LOST),
        ("host_lost", "b", 3),
        ("host_lost", "b", 2),
    ),
    "a host that is heard again": (
        (OPENED, B_OPENED, SILENT, PeerHeard(of_host="b"), LOST, B_LOST),
        ("lost", "a", 4),
        ("lost", "a", 4),
    ),
}


@pytest.mark.parametrize(("events", "of_one", "of_all"), CASES.values(), ids=CASES)
def test_the_first_failure_is_the_cause(
    events: tuple[Event, ...], of_one: object, of_all: object
) -> None:
    assert end(events, sees_all=False) == of_one
    assert end(events, sees_all=True) == of_all


@pytest.mark.parametrize(("events", "of_one", "of_all"), CASES.values(), ids=CASES)
def test_a_failure_is_returned_once(
    events: tuple[Event, ...], of_one: tuple[str, str, int] | None, of_all: object
) -> None:
    ends = AttemptEnds()
    causes = [ends.note_event(on(event.host or "a", event)) for event in events]
    cause = of_one[0] if of_one is not None else ""
    assert [cause for cause in causes if cause] == ([cause] if cause not in PEACEFUL else [])
    assert ends.cause == cause
    ends.note_event(msgspec.structs.replace(OPENED, run_attempt=2))
    assert (ends.attempt, ends.cause) == (2, "")
