"""The decisions after ends: tables of ends and what follows each."""

from __future__ import annotations

import math

import pytest

from holdfast.errors import RunBusyError, StructureMismatchError
from holdfast.supervise.ends import End, EndCause, Evidence, classify
from holdfast.supervise.restarts import Budgets, Decision, Restarts
from tests.supervise.test_ends import report, reported

FAILED = classify(Evidence(code=5))
KILLED = classify(Evidence(code=137))
LOST = classify(Evidence(code=1, lost_host="host-b"))
HUNG = classify(Evidence(code=137, hang="no step for 30 s", hang_step=4))
NOTICED = classify(Evidence(code=0, ends=[report(preempted=True)]))


def raised(step: int | None, message: str = "bad") -> End:
    return classify(Evidence(code=1, errors=[reported(ValueError(message), last_step=step)]))


def decisions(budgets: str, *ends: tuple[End, bool | None], apart: float = 1.0) -> list[Decision]:
    """What follows each of the ends, which are `apart` seconds from each other."""
    restarts = Restarts(Budgets.parse(budgets), "host-a")
    return [
        restarts.decide(end, number * apart, has_progress=progress)
        for number, (end, progress) in enumerate(ends)
    ]


def waits(made: list[Decision]) -> list[float | None]:
    return [decision.restart_in_secs for decision in made]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", Budgets(3)),
        ("0", Budgets()),
        ("inf", Budgets(math.inf)),
        (" error=3, lost=inf", Budgets(0, {EndCause.ERROR: 3, EndCause.LOST: math.inf})),
        ("5,lost=100", Budgets(5, {EndCause.LOST: 100})),
    ],
)
def test_budgets_are_read(text: str, expected: Budgets) -> None:
    assert Budgets.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "3,4", "finished=1", "error", "error=", "error=1,error=2", "x=1", "٣"]
)
def test_a_bad_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Budgets.parse(text)


def test_a_command_that_opens_no_run_is_restarted_after_growing_waits_until_all_are_used() -> None:
    made = decisions("6", *[(FAILED, None)] * 7)
    assert waits(made) == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, None]
    assert made[0].count_text == "restart 1 of 6"
    assert made[-1].reason == "6 of 6 restarts made"
    assert decisions("0", (FAILED, None)) == [Decision()]


def test_the_first_restart_after_a_new_checkpoint_waits_for_nothing() -> None:
    ends = [(KILLED, None), (KILLED, None), (KILLED, True), (LOST, False), (KILLED, True)]
    assert waits(decisions("9", *ends, apart=4000)) == [0.5, 1.0, 0.0, 0.5, 0.0]


def test_each_class_has_its_own_budget() -> None:
    made = decisions("lost=inf,error=1", (LOST, True), (FAILED, True), (LOST, True), (FAILED, True))
    assert waits(made) == [0.0, 0.0, 0.0, None]
    assert [decision.count_text for decision in made[:2]] == [
        "restart 1 (lost)",
        "restart 1 of 1 (error)",
    ]
    assert made[-1].reason == "1 of 1 restart made"
    (refused,) = decisions("lost=inf", (KILLED, True))
    assert refused.reason == "--max-restarts gives no restart for `killed`"
    mixed = decisions("1,lost=1", (LOST, True), (KILLED, True), (FAILED, True))
    assert waits(mixed) == [0.0, 0.0, None]


def test_a_preempted_command_is_restarted_here_only_on_demand() -> None:
    told = classify(Evidence(code=143, received=[15]))
    assert waits(decisions("3", (NOTICED, True))) == [None]
    assert waits(decisions("preempted=inf", (NOTICED, True))) == [0.0]
    assert waits(decisions("preempted=inf", (told, True))) == [None]


def test_the_same_exception_at_the_same_step_twice_stops() -> None:
    made = decisions("9", (raised(11), True), (KILLED, True), (raised(11, "other text"), True))
    assert waits(made) == [0.0, 0.0, None]
    assert made[-1].reason.startswith("it failed twice alike in the step after step 11: mend the")
    assert waits(decisions("9", (raised(11), True), (raised(12), True))) == [0.0, 0.0]
    assert waits(decisions("9", (raised(None), None), (raised(None), None))) == [0.5, 1.0]
    assert waits(decisions("9", (HUNG, True), (HUNG, True))) == [0.0, None]


def test_an_error_of_holdfast_twice_is_not_said_of_a_step_and_its_batch() -> None:
    refused = reported(StructureMismatchError("differs"), last_step=11)
    end = classify(Evidence(code=1, errors=[refused]))
    made = decisions("9", (end, True), (end, True))
    assert made[-1].reason.startswith("it failed twice alike after step 11: mend what the message")


def test_a_start_beside_another_one_of_the_run_uses_up_no_restart_for_ten_minutes() -> None:
    busy = classify(Evidence(code=1, errors=[reported(RunBusyError("live"), last_step=None)]))
    assert waits(decisions("0", (busy, None))) == [None]
    assert waits(decisions("1", *[(busy, None)] * 6)) == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    slow = decisions("1", *[(busy, None)] * 4, apart=301.0)
    assert waits(slow) == [0.5, 1.0, 2.0, None]
    # A program that opens its run a second time.
    itself = classify(Evidence(code=1, errors=[reported(RunBusyError("live"), last_step=3)]))
    assert waits(decisions("1", (itself, True), (itself, True))) == [0.0, None]
    # Another end begins the time anew, and counts.
    mixed = decisions("1", (busy, None), (FAILED, None), (busy, None), (FAILED, None), apart=301.0)
    assert waits(mixed) == [0.5, 1.0, 2.0, None]


def test_a_run_that_was_moved_is_not_begun_anew() -> None:
    moved = Restarts(Budgets.parse("9"), "host-a").decide(
        KILLED, 0.0, has_progress=True, gone_run="the run at /a was moved to /b"
    )
    assert moved.restart_in_secs is None
    assert moved.reason.startswith("the run at /a was moved to /b, so that a restart would not")


def test_two_ends_in_a_row_without_a_new_checkpoint_stop() -> None:
    made = decisions("9", (KILLED, False), (FAILED, False))
    assert waits(made) == [0.5, None]
    assert "2 attempts in a row ended without a new checkpoint" in made[-1].reason
    assert waits(decisions("9", (KILLED, False), (KILLED, True), (KILLED, False))) == [0.5, 0, 0.5]
    # The loss of other hosts says nothing of this command.
    assert waits(decisions("9", *[(LOST, False)] * 3)) == [0.5, 1.0, 2.0]


def test_a_host_that_fails_three_times_within_an_hour_is_named() -> None:
    ends = [(KILLED, True), (LOST, True), (LOST, True), (KILLED, True), (HUNG, True), (LOST, True)]
    named = [decision.named_host for decision in decisions("99", *ends)]
    assert named == ["", "", "", "", "host-a", "host-b"]
    slow = decisions("99", *[(KILLED, True)] * 4, apart=1801)
    assert not any(decision.named_host for decision in slow)
    # Exceptions of the program are no fault of its host.
    assert not any(d.named_host for d in decisions("99", *[(FAILED, None)] * 5))
