"""The cost of a checkpoint is told by the steps' own durations."""

from __future__ import annotations

import pytest

from holdfast.manager.overhead import QUIET_COUNT_MIN, OverheadMeter


def told(durations: list[tuple[float, bool]]) -> list[float]:
    """What the meter says of steps of these durations, each with whether one is being saved."""
    meter, now, found = OverheadMeter(), 100.0, []
    meter.stepped(now, is_saving=False)
    for secs, is_saving in durations:
        now += secs
        cost = meter.stepped(now, is_saving=is_saving)
        if cost is not None:
            found.append(cost)
    return found


QUIET = [(0.1, False)] * QUIET_COUNT_MIN


def test_a_save_costs_what_its_steps_took_beyond_the_quiet_ones() -> None:
    # The last step of a save is the one in which it ends.
    assert told([*QUIET, (0.1, True), (0.3, True), (0.2, False)]) == [pytest.approx(0.3)]


def test_the_cost_is_told_once_enough_quiet_steps_are_known() -> None:
    saving = [(0.3, True), (0.2, False)]
    assert told([*saving, *QUIET[:-1]]) == []
    assert told([*saving, *QUIET]) == [pytest.approx(0.3)]


def test_one_slow_quiet_step_changes_nothing() -> None:
    assert told([*QUIET, (30.0, False), (0.1, True), (0.2, False)]) == [pytest.approx(0.1)]


def test_one_save_beside_an_evaluation_is_outvoted() -> None:
    save = [(0.1, True), (0.2, False)]
    assert told([*QUIET, *save, *save, *save, (0.1, True), (60.0, False)])[-1] == pytest.approx(0.1)


def test_the_first_save_counts_only_until_the_second() -> None:
    first, later = [(0.1, True), (5.1, False)], [(0.1, True), (0.2, False)]
    assert told([*QUIET, *first, *later]) == [pytest.approx(5.0), pytest.approx(0.1)]


def test_a_save_that_costs_nothing_costs_nothing_less() -> None:
    assert told([*QUIET, (0.05, True), (0.05, False)]) == [0.0]


def test_a_pause_is_no_step() -> None:
    meter = OverheadMeter()
    for number in range(QUIET_COUNT_MIN + 1):
        meter.stepped(number * 0.1, is_saving=False)
    meter.stepped(1.0, is_saving=True)
    meter.paused()
    assert meter.stepped(100.0, is_saving=True) is None
    assert meter.stepped(100.1, is_saving=False) == pytest.approx(0.4)
