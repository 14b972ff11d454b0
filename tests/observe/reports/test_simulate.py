"""The simulator: its books balance, and what is known in advance comes out."""

from __future__ import annotations

import random

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.observe.reports.simulate import Cluster, FailureKind, TierSetting, simulate
from holdfast.policy.best_interval import best_interval_secs, waste

ANY = frozenset({"process", "host"})


def tier(interval: float, cost: float, **more) -> TierSetting:
    found = {"name": "durable", "survives": ANY, "secs": 0.0, "restore_secs": 0.0, **more}
    return TierSetting(interval_secs=interval, cost_secs=cost, **found)


def cluster(per_hour: float, restart: float = 0.0, host_per_hour: float = 0.0) -> Cluster:
    kinds = [FailureKind(name="process", per_hour=per_hour)]
    kinds += [FailureKind(name="host", per_hour=host_per_hour)] if host_per_hour else []
    return Cluster(failures=kinds, restart_secs=restart)


def test_without_failures_only_checkpoints_cost() -> None:
    found = simulate(cluster(0.0), [tier(99.0, 1.0)], hours=1)
    assert found.failures == 0
    assert found.saving_secs == pytest.approx(36.0)
    assert found.productive_secs == pytest.approx(3600 - 36.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_time(seed: int) -> None:
    chance = random.Random(seed)
    tiers = [
        tier(chance.uniform(5, 500), chance.uniform(0, 3), secs=chance.uniform(0, 20)),
        tier(
            chance.uniform(1, 50),
            chance.uniform(0, 0.2),
            name="ram",
            survives=frozenset({"process"}),
            restore_secs=chance.uniform(0, 9),
        ),
    ]
    of = cluster(chance.uniform(0, 20), chance.uniform(0, 300), chance.uniform(0.01, 5))
    found = simulate(of, tiers, hours=50, seed=seed)
    parts = found.productive_secs + found.redone_secs + found.saving_secs + found.restart_secs
    assert parts == pytest.approx(found.wall_secs) == pytest.approx(50 * 3600)
    assert min(found.productive_secs, found.redone_secs, found.saving_secs) >= 0


def test_half_an_interval_is_lost_by_a_failure() -> None:
    found = simulate(cluster(1 / 24), [tier(600.0, 0.0)], hours=24 * 2000)
    assert found.redone_secs / found.failures == pytest.approx(300, rel=0.05)


def test_a_checkpoint_counts_once_it_has_arrived() -> None:
    found = simulate(cluster(1 / 24), [tier(600.0, 0.0, secs=300.0)], hours=24 * 2000)
    assert found.redone_secs / found.failures == pytest.approx(600, rel=0.05)


def test_a_lost_host_takes_the_checkpoints_in_its_ram() -> None:
    ram = tier(1.0, 0.0, name="ram", survives=frozenset({"process"}))
    found = simulate(cluster(1 / 24), [ram], hours=24 * 100)
    assert found.redone_secs / found.failures < 1
    hosts = Cluster(failures=[FailureKind(name="host", per_hour=1 / 24)], restart_secs=0)
    # Nothing is left: the training begins again.
    assert simulate(hosts, [ram], hours=24 * 100).productive_secs < 24 * 3600 * 10
    both = simulate(hosts, [ram, tier(600.0, 0.0)], hours=24 * 1000)
    assert both.redone_secs / both.failures == pytest.approx(300, rel=0.1)


def test_the_same_seed_gives_the_same_failures_whatever_is_saved() -> None:
    one, other = (simulate(cluster(2.0), [tier(i, 1.0)], hours=100, seed=5) for i in (50.0, 80.0))
    assert one.failures == other.failures
    assert one != simulate(cluster(2.0), [tier(50.0, 1.0)], hours=100, seed=6)


def test_a_cluster_of_a_hundred_thousand_accelerators_is_simulated() -> None:
    # One failure in 50,000 hours of an accelerator: two an hour.
    ram = tier(30.0, 0.05, name="ram", survives=frozenset({"process"}))
    of = cluster(1.6, 180.0, 0.4)
    found = simulate(of, [ram, tier(600.0, 2.0, secs=60.0)], hours=1000)
    assert 0.7 < found.goodput < 0.95


@pytest.mark.parametrize("seed", [*range(12), pytest.param(-1, marks=pytest.mark.soak)])
def test_the_advised_interval_is_within_5_percent_of_the_simulated_optimum(seed: int) -> None:
    """A seed of -1 stands for a thousand clusters."""
    for number in range(1000) if seed == -1 else [seed]:
        chance = random.Random(f"cluster {number}")
        mtbf_secs = 3600 * 10 ** chance.uniform(-0.5, 2)
        cost = 10 ** chance.uniform(-2, 1.5)
        secs = chance.choice([0.0, chance.uniform(0, 60)])
        of = cluster(3600 / mtbf_secs, chance.uniform(10, 600))
        best = max(best_interval_secs(cost, 1 / mtbf_secs), secs)
        hours = 400 * mtbf_secs / 3600

        def goodput(interval: float, of=of, hours=hours, cost=cost, secs=secs) -> float:
            return simulate(of, [tier(interval, cost, secs=secs)], hours=hours).goodput

        advised = goodput(best)
        factors = (1 / 8, 1 / 4, 1 / 2, 0.7, 1.4, 2, 4, 8)
        others = [goodput(max(best * factor, secs, 1e-3)) for factor in factors]
        assert advised >= 0.95 * max(others), number


@pytest.mark.parametrize(("interval", "per_hour"), [(100.0, 0.5), (600.0, 0.1), (30.0, 2.0)])
def test_the_formula_of_waste_agrees_with_the_simulation(interval: float, per_hour: float) -> None:
    found = simulate(cluster(per_hour), [tier(interval, 1.0, secs=5.0)], hours=3000 / per_hour)
    wasted = (found.redone_secs + found.saving_secs) / found.productive_secs
    assert wasted == pytest.approx(waste(interval, 1.0, 5.0, per_hour / 3600), rel=0.1)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="interval_secs of durable"):
        simulate(cluster(1.0), [tier(0.0, 1.0)], hours=1)
    with pytest.raises(InvalidArgumentError, match="hours"):
        simulate(cluster(1.0), [], hours=-1)
    with pytest.raises(InvalidArgumentError, match="per_hour of process of 0 or more"):
        simulate(cluster(-1.0), [], hours=1)


def test_a_kind_that_is_misspelt_and_a_lone_tier_are_refused() -> None:
    wrong = tier(100.0, 1.0, survives=frozenset({"hst"}))
    with pytest.raises(InvalidArgumentError, match=r"survives of durable .* found \['hst'\]"):
        simulate(cluster(1.0), [wrong], hours=1)
    with pytest.raises(InvalidArgumentError, match="tiers to be a list"):
        simulate(cluster(1.0), tier(100.0, 1.0), hours=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="hours above 0, found '5'"):
        simulate(cluster(1.0), [], hours="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="cost_secs of durable of 0 or more, found nan"):
        simulate(cluster(1.0), [tier(100.0, float("nan"))], hours=1)


@pytest.mark.parametrize(("per_hour", "hours"), [(1e9, 1.0), (1.0, 1e9)])
def test_a_simulation_that_would_not_end_is_refused(per_hour: float, hours: float) -> None:
    with pytest.raises(InvalidArgumentError, match="at most 1,000,000 failures"):
        simulate(cluster(per_hour), [], hours=hours)
