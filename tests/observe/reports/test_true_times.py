"""A report agrees with times that were measured outside of Holdfast, in a run that is killed."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.observe.events.reader import EventReader
from holdfast.observe.reports.goodput import report_run
from holdfast.observe.reports.model import RunReport
from tests.hosts import Host, host, wait_until


@pytest.fixture
def one_host() -> Iterator[Host]:
    with host() as made:
        yield made


SCRIPT = Path(__file__).with_name("timed_trainer.py")
STEP_SECS = 0.1
OPTIONS = {
    "step_secs": STEP_SECS,
    "every": 7,
    "wait_every": 5,
    "wait_secs": 0.15,
    "first_secs": 0.4,
}


@dataclass
class Truth:
    """What was measured outside."""

    began: float = 0.0
    ended: float = 0.0
    last_end: float = 0.0
    high: int = -1
    amounts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("productive", "redone", "restart", "blocked", "waiting"), 0.0
        )
    )
    steps_lost: list[int] = field(default_factory=list)
    to_next_secs: list[float] = field(default_factory=list)


def lines_of(journal: Path) -> list[dict]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def count(truth: Truth, lines: list[dict], killed: float | None, lost_at: float | None) -> None:
    """Adds one start: `killed` is when it was, `lost_at` when the start before was."""
    ends = [line["ended"] for line in lines if "step" in line]
    step_secs = statistics.median(b - a for a, b in pairwise(ends))
    waited = blocked = 0.0
    last: float | None = None
    if killed is not None and "waits" in lines[-1]:
        lines = [*lines, {"waited": killed - lines[-1]["waits"]}]
    for line in lines:
        waited += line.get("waited", 0.0)
        blocked += line.get("blocked", 0.0)
        if "step" not in line:
            continue
        own = "redone" if line["step"] <= truth.high else "productive"
        if last is None:
            truth.amounts["restart"] += line["ended"] - truth.last_end - step_secs
            truth.amounts[own] += step_secs
            if lost_at is not None:
                truth.steps_lost.append(truth.high - line["step"] + 1)
                truth.to_next_secs.append(line["ended"] - lost_at)
        else:
            truth.amounts[own] += line["ended"] - last - waited - blocked
            truth.amounts["waiting"] += waited
            truth.amounts["blocked"] += blocked
        waited = blocked = 0.0
        last = line["ended"]
        truth.high = max(truth.high, line["step"])
    assert last is not None
    # A wait in the step that was cut off is no time of the restart.
    truth.last_end = last + waited
    truth.amounts["waiting"] += waited
    if killed is None:
        truth.amounts["blocked"] += blocked


def run_with_kills(host: Host, run: Path, folder: Path, kills: int, seed: int) -> Truth:
    """Trains to the end, with SIGKILLs at seeded moments and seeded pauses before restarts."""
    chance, truth = random.Random(seed), Truth()
    lost_at: float | None = None
    options = OPTIONS | {"steps": 25 * (kills + 1)}
    for start in range(kills + 1):
        journal = folder / f"journal-{start}"
        began = time.monotonic()
        if start == 0:
            truth.began = truth.last_end = began
        trainer = host.start(SCRIPT, run, journal, json.dumps(options), stem="numpy")
        killed = None
        if start < kills:
            wanted = chance.randrange(12, 30)
            wait_until(lambda path=journal, least=wanted: len(lines_of(path)) >= least)
            time.sleep(chance.random() * STEP_SECS)
            trainer.kill()
            killed = time.monotonic()
        trainer.communicate()
        truth.ended = time.monotonic()
        count(truth, lines_of(journal), killed, lost_at)
        lost_at = killed
        time.sleep(chance.uniform(0.2, 1.5))
    return truth


def assert_close(found: RunReport, truth: Truth) -> None:
    exact = sum(round(secs * 1e6) for secs in found.categories.values())
    assert exact == round(found.wall_secs * 1e6)
    wrong = []
    for name, secs in truth.amounts.items():
        reported = found.categories[name]
        if name == "productive":
            # Of a step that sleeps no save is the reason for a longer one.
            reported += found.categories["inflation"]
        difference = abs(reported - secs)
        print(f"{name}: {reported:.3f} s reported, {secs:.3f} s measured")
        if difference > max(0.02 * secs, STEP_SECS):
            wrong.append(name)
    print(found.categories, found.notes)
    assert wrong == []
    assert [one.steps_lost for one in found.failures] == truth.steps_lost
    assert [one.cause for one in found.failures] == ["lost"] * len(truth.steps_lost)
    for one, secs in zip(found.failures, truth.to_next_secs, strict=True):
        assert abs((one.secs_to_next_step or 0) - secs) < STEP_SECS + 0.02 * secs


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_each_category_is_within_two_percent_or_one_step(
    one_host: Host, tmp_path: Path, seed: int
) -> None:
    run = tmp_path / "run"
    truth = run_with_kills(one_host, run, tmp_path, kills=5, seed=seed)
    found = report_run("run", EventReader(run).read())
    assert_close(found, truth)
    assert abs(found.wall_secs - (truth.ended - truth.began)) < 0.02 * found.wall_secs + 1.0
