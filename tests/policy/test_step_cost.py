"""A checkpoint costs what its steps took beyond quiet ones, and no more than it was being saved."""

from __future__ import annotations

import random

import pytest

from holdfast.policy.step_cost import BESIDE_COUNT_MAX, QUIET_COUNT_MIN, StepCost


def steps_of(secs: float, count: int = QUIET_COUNT_MIN) -> StepCost[str]:
    """A cost that knows quiet steps."""
    cost = StepCost[str]()
    cost.add_steps("", count * secs, 0.0, count)
    return cost


def test_a_step_costs_what_it_took_beyond_the_median_of_quiet_ones() -> None:
    cost = steps_of(0.1)
    cost.add_steps("", 30.0, 0.0)
    cost.add_steps("save", 0.3, 0.3)
    cost.add_steps("save", 0.2, 0.15)
    cost.add_steps("write", 0.15, 0.1)
    assert cost.take() == {"save": pytest.approx(0.3), "write": pytest.approx(0.05)}
    assert cost.take() == {}


@pytest.mark.parametrize("saving_secs", [0.02, 0.5])
def test_a_compilation_or_a_stall_costs_no_more_than_the_save_within_it(saving_secs: float) -> None:
    cost = steps_of(0.1)
    cost.add_steps("save", 60.0, saving_secs)
    assert cost.take() == {"save": pytest.approx(saving_secs)}


def test_a_median_needs_eight_quiet_steps_and_the_steps_before_them_count_then() -> None:
    cost = steps_of(0.1, QUIET_COUNT_MIN - 1)
    cost.add_steps("save", 0.3, 0.3)
    assert (cost.take(), cost.quiet_secs) == (None, None)
    cost.add_steps("", 0.1, 0.0)
    assert (cost.take(), cost.quiet_secs) == ({"save": pytest.approx(0.2)}, pytest.approx(0.1))


def test_steps_with_saves_of_less_than_a_hundredth_show_how_long_quiet_ones_are() -> None:
    cost = StepCost[str]()
    for _ in range(QUIET_COUNT_MIN):
        cost.add_steps("save", 4.0, 0.005)
    assert cost.quiet_secs == 4.0
    assert cost.take() == {"save": 0.0}
    cost.add_steps("save", 4.2, 0.005)
    assert cost.take() == {"save": pytest.approx(0.005)}


def test_chance_cancels_out() -> None:
    chance, cost, total_secs = random.Random(1), steps_of(0.1), 0.0
    for _ in range(500):
        cost.add_steps("", chance.gauss(0.1, 0.01), 0.0)
        cost.add_steps("save", chance.gauss(0.1, 0.01), 0.02)
        total_secs += (cost.take() or {})["save"]
    assert abs(total_secs) / 500 < 0.001


def test_steps_that_wait_for_quiet_ones_are_bounded() -> None:
    cost = StepCost[str]()
    for _ in range(2 * BESIDE_COUNT_MAX):
        cost.add_steps("save", 0.2, 0.2)
    cost.add_steps("", QUIET_COUNT_MIN * 0.1, 0.0, QUIET_COUNT_MIN)
    assert cost.take() == {"save": pytest.approx(0.1 * BESIDE_COUNT_MAX)}
