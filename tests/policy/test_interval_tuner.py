"""The interval of `goodput="auto"` follows costs and failures, slowly, and within its budget."""

from __future__ import annotations

import math
import random
from datetime import timedelta

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.observe.reports.simulate import Cluster, FailureKind, TierSetting, simulate
from holdfast.policy.best_interval import BUDGET_LONGEST_SECS, best_interval_secs, waste
from holdfast.policy.contexts import CheckpointInfo, SaveContext
from holdfast.policy.interval_tuner import (
    FREE_SECS,
    LONGEST_SECS,
    TOLD_FACTOR,
    IntervalTuner,
    resolution_secs,
)
from holdfast.policy.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    FixedIntervalPolicy,
)
from holdfast.policy.save_evaluation import auto_member, decode, encode
from tests.observe.events.written import at

RATE = 1 / 7200
AUTO = ContinuousCheckpointingPolicy(goodput="auto")


def updated(
    tuner: IntervalTuner,
    cost_secs: float | None,
    per_sec: float = RATE,
    max_overhead: float | None = None,
    *,
    checkpoints: int = 1,
    least_secs: float = 0.0,
) -> bool:
    """Whether the interval changes after so many more checkpoints of this cost."""
    has_changed = False
    for _ in range(checkpoints):
        tuner_step = 0 if tuner._checkpoint is None else tuner._checkpoint.step + 1
        has_changed |= tuner.update(
            checkpoint=CheckpointInfo(tuner_step, at(0)),
            cost_secs=cost_secs,
            per_sec=per_sec,
            max_overhead=max_overhead,
            least_secs=least_secs,
        )
    return has_changed


def tuned(cost_secs: float, per_sec: float = RATE, budget: float | None = None) -> float | None:
    """The interval after as many checkpoints as it may take to grow."""
    tuner = IntervalTuner()
    updated(tuner, cost_secs, per_sec, budget, checkpoints=10)
    return tuner.interval_secs


def test_without_a_cost_there_is_no_interval_and_with_one_it_is_the_best() -> None:
    tuner = IntervalTuner()
    assert not updated(tuner, None)
    assert tuner.interval_secs is None
    assert updated(tuner, 0.2)
    assert tuner.interval_secs == best_interval_secs(0.2, RATE)
    assert tuner.interval_secs == pytest.approx(math.sqrt(2 * 0.2 / RATE), rel=0.02)


def test_beyond_a_minute_a_checkpoint_at_most_doubles_it() -> None:
    tuner, rate = IntervalTuner(), 0.5 / 43_200
    # A stall of a minute that was taken for the cost of the first checkpoint.
    for _ in range(3):
        tuner.update(checkpoint=None, cost_secs=62.0, per_sec=rate, max_overhead=None)
    assert tuner.interval_secs == FREE_SECS
    lengths = []
    for _ in range(8):
        updated(tuner, 62.0, rate)
        assert not tuner.update(
            checkpoint=tuner._checkpoint, cost_secs=62.0, per_sec=rate, max_overhead=None
        )
        lengths.append(tuner.interval_secs)
    assert lengths[:5] == [120.0, 240.0, 480.0, 960.0, 1920.0]
    assert lengths[5:] == [lengths[5]] * 3
    # It is shortened at once.
    assert updated(tuner, 0.1, rate)
    assert tuner.interval_secs == best_interval_secs(0.1, rate)


def test_only_a_large_change_is_reported_once() -> None:
    tuner = IntervalTuner()
    jumps = []
    for cost_secs in (0.001, 0.003, 0.04, 0.041, 0.0001):
        updated(tuner, cost_secs, checkpoints=3)
        jumps.append(tuner.take_jump())
    first, third = best_interval_secs(0.001, RATE), best_interval_secs(0.04, RATE)
    assert third > TOLD_FACTOR * first
    assert jumps == [None, None, first, None, third]


def test_a_budget_makes_it_longer_and_nothing_makes_it_longer_than_an_hour() -> None:
    assert tuned(2.0, budget=0.001) == 2000.0
    assert tuned(2.0, budget=0.5) == tuned(2.0)
    assert tuned(200.0, per_sec=1e-12) == LONGEST_SECS
    assert tuned(100.0, per_sec=1e-12, budget=0.01) == 10_000.0
    assert tuned(100.0, per_sec=1e-12, budget=0.0001) == BUDGET_LONGEST_SECS


def test_a_cost_that_is_noise_makes_no_burst_of_checkpoints() -> None:
    # Measured: 22 ms of steps of 45 ms, then nothing, then 2.5 ms.
    tuner, rate = IntervalTuner(), 0.5 / 43_200
    for cost in (0.022, 0.0, 0.0025, 0.0):
        cost = max(cost, resolution_secs(0.045))
        updated(tuner, cost, rate, least_secs=0.01)
        assert tuner.interval_secs is not None
        assert tuner.interval_secs > 5
    assert resolution_secs(None) > 0


def test_no_interval_is_shorter_than_a_checkpoint_takes_to_reach_the_tier() -> None:
    tuner = IntervalTuner()
    updated(tuner, 0.001, 1.0, least_secs=20.0)
    assert tuner.interval_secs == 20.0


def test_noise_changes_nothing_and_a_real_change_does() -> None:
    tuner = IntervalTuner()
    updated(tuner, 2.0, RATE, 0.05, checkpoints=10)
    chosen, chance = tuner.interval_secs, random.Random(1)
    for _ in range(500):
        factor = math.exp(chance.uniform(-0.7, 0.7))
        assert not updated(tuner, 2.0 * factor, RATE, 0.05)
    assert tuner.interval_secs == chosen
    assert updated(tuner, 2.0, 20 * RATE, 0.05)
    assert tuner.interval_secs is not None
    assert chosen is not None
    assert tuner.interval_secs == chosen / 3
    assert updated(tuner, 20.0, 20 * RATE, 0.05)
    assert tuner.interval_secs == pytest.approx(400.0)


def test_what_it_keeps_never_wastes_more_than_half_again_as_much_as_the_best() -> None:
    chance, tuner = random.Random(2), IntervalTuner()
    for _ in range(2000):
        cost, rate = 10 ** chance.uniform(-2, 1.5), 1 / 10 ** chance.uniform(2.5, 5)
        updated(tuner, cost, rate, checkpoints=10)
        assert tuner.interval_secs is not None
        best = min(best_interval_secs(cost, rate), LONGEST_SECS)
        assert waste(tuner.interval_secs, cost, 0, rate) <= 1.5 * waste(best, cost, 0, rate) + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_in_a_simulated_cluster_it_is_within_five_percent_of_the_best(seed: int) -> None:
    chance = random.Random(seed)
    cost, mtbf_secs = 10 ** chance.uniform(-1, 1), 10 ** chance.uniform(3, 4.5)
    cluster = Cluster(
        failures=[FailureKind(name="process", per_hour=3600 / mtbf_secs)], restart_secs=60
    )

    def goodput(interval_secs: float) -> float:
        tier = TierSetting(
            name="t", interval_secs=interval_secs, cost_secs=cost, survives=frozenset({"process"})
        )
        return simulate(cluster, [tier], hours=300 * mtbf_secs / 3600, seed=seed).goodput

    chosen = tuned(cost, 1 / mtbf_secs)
    assert chosen is not None
    best = max(goodput(chosen * factor) for factor in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0))
    assert goodput(chosen) >= 0.95 * best


def context(advised: float | None, cost: float | None = 1.0) -> SaveContext:
    return SaveContext(
        now=at(100),
        is_saving_in_progress=False,
        reached_preemption=False,
        save_cost_secs=cost,
        advised_interval_secs=advised,
    )


def test_the_policy_saves_once_the_advised_interval_has_passed() -> None:
    last = [CheckpointInfo(5, at(100) - timedelta(seconds=30))]
    assert AUTO.should_save(6, [], context=context(None))
    assert not AUTO.should_save(6, last, context=context(None))
    assert not AUTO.should_save(6, last, context=context(31.0))
    assert AUTO.should_save(6, last, context=context(30.0))
    assert AUTO.should_save(6, last, context=context(0.0))
    slower = ContinuousCheckpointingPolicy(minimum_interval_secs=60, goodput="auto")
    assert not slower.should_save(6, last, context=context(30.0))


def test_it_is_found_in_a_policy_of_several_and_travels_as_json() -> None:
    several = AnySavePolicy([FixedIntervalPolicy(10), AUTO])
    assert auto_member(several) == AUTO == decode(encode(AUTO)) == auto_member(AUTO)
    assert auto_member(ContinuousCheckpointingPolicy(max_overhead=0.1)) is None
    assert auto_member(None) is None
    assert AUTO.needs_cost


@pytest.mark.parametrize("wrong", ["Auto", True, 0.9, ""])
def test_only_auto_is_a_goodput(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match="goodput to be 'auto' or None"):
        ContinuousCheckpointingPolicy(goodput=wrong)  # type: ignore[arg-type]
