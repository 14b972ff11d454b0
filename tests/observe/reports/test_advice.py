"""Advice on intervals, against published figures and made-up reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast import CheckpointManager, save_decision_policy
from holdfast.cli.main import main
from holdfast.format.json_codec import decode
from holdfast.observe.reports.advice import (
    RunAdvice,
    advise_run,
    cluster_of,
    settings_of,
)
from holdfast.observe.reports.model import CATEGORIES, Intervals, RunFailure, RunReport, TierReport
from holdfast.observe.reports.simulate import simulate
from holdfast.policy.best_interval import best_interval_secs, waste
from holdfast.policy.failure_rates import failure_rate, gamma_quantile, gamma_share
from tests.hosts import Host, host

HOUR = 3600.0


def failure(cause: str, secs: float = 100.0) -> RunFailure:
    return RunFailure(
        time=datetime.now(UTC),
        at_secs=0.0,
        attempt=1,
        cause=cause,
        host="host",
        last_step=5,
        steps_lost=1,
        secs_to_next_step=secs,
        source="ram",
        sources={},
    )


def tier(interval: float, cost: float | None, secs: float = 0.0) -> TierReport:
    spans = Intervals(count=5, p50_secs=interval, p95_secs=interval, max_secs=interval)
    return TierReport(checkpoints=6, intervals=spans, cost_secs=cost, secs=secs)


def report(hours: float, causes: list[str], **tiers: TierReport) -> RunReport:
    return RunReport(
        run="runs/gpt",
        started=None,
        wall_secs=hours * HOUR,
        categories=dict.fromkeys(CATEGORIES, 0.0),
        restart={},
        goodput=0.9,
        attempts=[],
        failures=[failure(cause) for cause in causes],
        tiers=tiers,
        slowest_rank=None,
        waiting={},
        steps=100,
        timeline=[],
        notes=[],
    )


@pytest.mark.parametrize("mtbf_hours", [1.0, 3.0, 24.0, 1000.0])
def test_the_best_interval_is_youngs_and_dalys_in_the_limit(mtbf_hours: float) -> None:
    rate = 1 / (mtbf_hours * HOUR)
    young = math.sqrt(2 * 2.0 / rate)
    assert best_interval_secs(2.0, rate) == pytest.approx(young, rel=0.03)
    daly = young * (1 + math.sqrt(2.0 * rate / 2) / 3 + 2.0 * rate / 2 / 9) - 2.0
    assert best_interval_secs(2.0, rate) == pytest.approx(daly, rel=1e-4)
    assert math.isinf(best_interval_secs(2.0, 0.0))
    assert best_interval_secs(0.0, rate) == 0.0


def test_published_figures_of_one_and_two_tiers_come_out() -> None:
    # 2 s and three hours: 208 s, 1.9 percent.
    assert best_interval_secs(2.0, 1 / (3 * HOUR)) == pytest.approx(208, abs=2)
    # RAM 0.05 s and 3 h beside durable 2 s and 48 h: 33 s and 831 s.
    assert best_interval_secs(0.05, 1 / (3 * HOUR)) == pytest.approx(33, abs=1)
    assert best_interval_secs(2.0, 1 / (48 * HOUR)) == pytest.approx(831, abs=3)


def test_the_failure_rate_has_an_interval_of_belief() -> None:
    assert 1 / failure_rate(0, 24).per_hour == pytest.approx(72)
    assert 1 / failure_rate(3, 24).per_hour == pytest.approx(10.3, abs=0.1)
    few, many = failure_rate(3, 24), failure_rate(300, 2400)
    for rate in (few, many):
        assert rate.low_per_hour < rate.per_hour < rate.high_per_hour
    assert many.high_per_hour / many.low_per_hour < few.high_per_hour / few.low_per_hour


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.5, 40.0, 300.0])
def test_quantiles_of_the_gamma_distribution(shape: float) -> None:
    for share in (0.05, 0.5, 0.95):
        assert gamma_share(shape, gamma_quantile(shape, share)) == pytest.approx(share, rel=1e-6)
    drawn = np.random.default_rng(0).gamma(shape, size=200_000)
    assert gamma_quantile(shape, 0.9) == pytest.approx(np.quantile(drawn, 0.9), rel=0.02)


def test_a_burst_of_checkpoints_is_not_the_interval_of_today() -> None:
    values = [1.17] * 21 + [37.0, 60.0, 86.0]
    burst = Intervals(count=24, p50_secs=1.17, p95_secs=60.0, max_secs=86.0, values_secs=values)
    found = report(24, [], durable=TierReport(checkpoints=25, intervals=burst, cost_secs=0.02))
    assert advise_run(found).tiers[0].interval_secs == 60


def test_a_gain_that_is_noise_is_no_reason_to_change() -> None:
    (one,) = advise_run(report(1, [], durable=tier(2.04, 0.0))).tiers
    assert one.best_secs > 0.5
    assert not one.is_needed


def test_a_change_is_advised_beyond_a_factor_of_one_and_a_half_only() -> None:
    causes = ["lost"] * 8
    near = advise_run(report(24, causes, durable=tier(300.0, 2.0))).tiers[0]
    assert not near.is_needed
    for interval in (5.0, 7200.0):
        far = advise_run(report(24, causes, durable=tier(interval, 2.0))).tiers[0]
        assert far.is_needed
        assert far.best_secs == near.best_secs == pytest.approx(262, rel=0.1)
        assert far.low_secs < far.best_secs < far.high_secs


def test_each_tier_pays_for_the_failures_that_it_is_the_nearest_for() -> None:
    causes = ["lost"] * 8 + ["host_lost", "preempted", "preempted"]
    found = advise_run(report(24, causes, ram=tier(30.0, 0.05), durable=tier(60.0, 2.0, 5.0)))
    ram, durable = found.tiers
    assert found.failures["process"].per_hour > 5 * found.failures["host"].per_hour
    assert durable.best_secs > 5 * ram.best_secs
    assert durable.is_needed
    assert found.restart_secs == 100.0
    alone = advise_run(report(24, causes, durable=tier(60.0, 2.0, 5.0)))
    assert alone.gains["a RAM tier"] > 0.005
    assert "a RAM tier" not in found.gains
    assert found.best_goodput > alone.best_goodput


def test_a_checkpoint_is_not_advised_before_the_last_one_has_arrived() -> None:
    (one,) = advise_run(report(24, ["lost"] * 8, durable=tier(600.0, 0.01, 500.0))).tiers
    assert one.best_secs == 500.0


def test_what_was_not_measured_is_noted_and_not_guessed() -> None:
    found = advise_run(report(24, [], durable=tier(60.0, None), ram=TierReport(checkpoints=1)))
    assert found.tiers == []
    assert {note.partition(":")[0] for note in found.notes} >= {"ram", "durable"}
    assert any("60 s: none was observed" in line for line in found.assumed)


def test_what_was_observed_is_separate_from_what_is_assumed() -> None:
    found = advise_run(report(24, ["lost"] * 3, durable=tier(60.0, 2.0, 5.0)))
    assert found.observed == [
        "1 d 0 h of training, 3 failures of processes, 0 failures of hosts",
        "a restart took 1 min 40 s, the median of 3",
        "a checkpoint in the durable tier cost 2 s of the training and reached it in 5 s",
    ]
    assert [line.partition(":")[0] for line in found.assumed] == [
        "failures of processes",
        "failures of hosts",
        "an interval may be shorter than a step",
    ]
    assert not any("1 ms" in line for line in found.assumed)
    assert "one in 10 h" in found.assumed[0]
    (line, *_) = advise_run(report(24, []), mtbf_hours=3.0).assumed
    assert line == "a failure in 3 h 0 min, of the kinds as observed"


@pytest.mark.parametrize("mtbf_hours", [1.0, 12.0])
def test_the_expected_goodput_is_that_of_the_simulation(mtbf_hours: float) -> None:
    causes = ["lost"] * 8 + ["host_lost"] * 2
    found = report(24, causes, ram=tier(60.0, 0.1), durable=tier(600.0, 2.0, 5.0))
    advice = advise_run(found, mtbf_hours=mtbf_hours)
    for is_best, expected in ((False, advice.goodput), (True, advice.best_goodput)):
        tiers = settings_of(advice, found, is_best=is_best)
        outcome = simulate(cluster_of(advice), tiers, hours=2000 * mtbf_hours)
        assert outcome.goodput == pytest.approx(expected, rel=0.02)


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made


def test_the_command_advises_a_run_that_was_trained(
    one_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, state = tmp_path / "run", {"w": np.ones(100_000)}
    every = save_decision_policy.FixedIntervalPolicy(5)
    assert main(["advise", str(run)]) == 1
    with CheckpointManager(run, save_decision_policy=every) as manager:
        start, state = manager.resume(state)
        for step in range(start, 60):
            state["w"] = state["w"] * 1.0001
            for _ in range(20):
                np.linalg.eigvalsh(np.eye(40))
            manager.save(step, state)
    capsys.readouterr()
    code = main(["advise", str(run), "--what-if", "--mtbf", "2", "--json"])
    out, err = capsys.readouterr()
    if code == 1:
        # Steps of a busy machine may all have had a save beside them.
        assert "expected a training with measured checkpoints" in err
        return
    found = decode(out, dict)
    assert {one["tier"] for one in found["advice"]["tiers"]} <= {"ram", "durable"}
    (row,) = found["what_if"]
    assert 0 < row["today"]["goodput"] <= 1
    assert main(["advise", str(run), "--what-if"]) == 0
    assert "expected goodput" in capsys.readouterr().out


def test_the_command_prints_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(24, ["lost"] * 8, ram=tier(30.0, 0.05), durable=tier(5.0, 2.0))
    monkeypatch.setattr("holdfast.cli.advise.report_of", lambda directory: found)
    assert main(["advise", "runs/gpt", "--what-if", "--mtbf", "1"]) == 0
    out = capsys.readouterr().out
    assert "keep the interval" in out
    assert "save less often" in out
    assert "observed  1 d 0 h of training, 8 failures of processes" in out
    assert "assumed  failures of processes: one in" in out
    assert isinstance(advise_run(found), RunAdvice)


def test_events_that_were_left_out_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "left out: a-run.000000001.jsonl: it cannot be read: Permission denied"
    for tiers, code in (({}, 1), ({"durable": tier(300.0, 2.0)}, 0)):
        found = msgspec.structs.replace(report(24, [], **tiers), notes=[note])
        monkeypatch.setattr("holdfast.cli.advise.report_of", lambda directory, r=found: r)
        assert main(["advise", "runs/gpt"]) == code
        assert note in capsys.readouterr().err


@pytest.mark.parametrize("hours", ["1e300", "nan", "inf", "0", "-1"])
def test_a_mean_time_that_is_none_is_refused(
    hours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "runs/gpt", "--what-if", "--mtbf", hours]) == 2
    assert "expected hours from 0.001 to 1,000,000" in capsys.readouterr().err


def test_a_mean_time_without_its_question_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "runs/gpt", "--mtbf", "3"]) == 2
    assert "--mtbf is for --what-if" in capsys.readouterr().err


MINDIO = {50: 600, 100: 2000, 150: 5000, 200: 8000, 450: 32_000}
"""Recommended intervals in seconds by the time of one save, read off MindIO's figure."""


def hours_for(cost: float, interval: float) -> float:
    """The mean time between failures for which an interval is the best."""
    low, high = 1.0, 1e9
    for _ in range(100):
        middle = math.sqrt(low * high)
        is_short = best_interval_secs(cost, 1 / middle) < interval
        low, high = (middle, high) if is_short else (low, middle)
    return low / HOUR


def test_mindios_table_differs_as_the_page_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "goodput.md").read_text()
    rate = 1 / (24 * HOUR)
    implied = []
    for cost, interval in MINDIO.items():
        best = best_interval_secs(cost, rate)
        implied.append(hours_for(cost, interval))
        theirs, least = waste(interval, cost, 0, rate), waste(best, cost, 0, rate)
        row = (
            f"| {cost} s | {interval:,} s | {best:,.0f} s | {implied[-1]:.1f} h "
            f"| {100 * theirs:.1f} %, {100 * least:.1f} % |"
        )
        assert row in page
    # No failure rate gives them all: the slowest save would need 300 times the MTBF of the fastest.
    assert implied == sorted(implied)
    assert implied[-1] > 250 * implied[0]
    x, y = ([math.log(one) for one in side] for side in (MINDIO, MINDIO.values()))
    slope = statistics.linear_regression(x, y).slope
    assert slope == pytest.approx(1.8, abs=0.05)
