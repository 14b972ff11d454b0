"""Hosts whose clocks are hours apart, and are set back, while their agents die: saving goes on."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from holdfast.host.wire import protocol
from tests.hosts import Host, events
from tests.trainer.job import Job, check_went_on, run_job, seen, start_job
from tests.trust.figures import tell

KILL_COUNT = 5
HOURS_MAX = 6.0
STARTUP = """
import os
from datetime import UTC, datetime, timedelta
import holdfast.clock

def now(self):
    with open(os.environ["TEST_CLOCK_FILE"]) as file:
        return datetime.now(UTC) + timedelta(hours=float(file.read()))

holdfast.clock.SystemClock.now = now
"""
"""What each process of a host runs first: its clock is ahead by as many hours as a file says."""


def skewed(one: Host, folder: Path) -> Path:
    """Gives the host a clock of its own; the file with its hours."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STARTUP)
    hours = folder / "hours"
    hours.write_text("0")
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    one.variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    one.variables["TEST_CLOCK_FILE"] = str(hours)
    return hours


def set_clock(hours: Path, value: float) -> None:
    """Sets a host's clock at once; no process reads a file that is half written."""
    aside = hours.with_name("aside")
    aside.write_text(str(value))
    aside.replace(hours)


def failed_steps(job: Job) -> list[int]:
    return [step for rank in job.ranks for line in rank.said("failed") for step in line["failed"]]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_clocks_hours_apart_drop_no_saves_while_agents_die(
    two_hosts: list[Host], tmp_path: Path, seed: int
) -> None:
    run, chance = tmp_path / "run", random.Random(seed)
    clocks = [skewed(one, tmp_path / f"clock-{one.name}") for one in two_hosts]
    for clock in clocks:
        set_clock(clock, chance.uniform(-HOURS_MAX, HOURS_MAX))
    todo: dict[str, Any] = {"device_count": 1, "lockstep": True, "sleep": 0.1, "interval": 1}
    job = start_job(two_hosts, run, **todo, goes_on=True, steps=10**6)
    job.wait_until(lambda: len(seen(run, "committed")) > 5)
    for _ in range(KILL_COUNT):
        number = chance.randrange(len(two_hosts))
        # The next agent of this host may begin hours before the one that it replaces.
        set_clock(clocks[number], chance.uniform(-HOURS_MAX, HOURS_MAX))
        two_hosts[number].kill_agent()
        before = max(seen(run, "committed"))
        job.wait_until(lambda before=before: max(seen(run, "committed")) > before + 5)
    dropped = {e["step"]: e["reason"] for e in events(run, "dropped", "failed")}
    reported = [why for why in dropped.values() if not why.endswith(protocol.SKIPPED)]
    # What the agent was told when it died may have to be made again; nothing is dropped in rows.
    assert len(reported) <= KILL_COUNT, dropped
    assert len(set(failed_steps(job))) <= KILL_COUNT, job.told()
    times = [event["time"] for event in events(run, "committed")]
    newest = max(seen(run, "committed"))
    job.kill()
    check = run_job(two_hosts, run, **todo, steps=1)
    (start,) = {result["start"] for result in check}
    assert start > newest
    check_went_on(check, start - 1)
    tell(
        f"clocks apart, seed {seed}",
        "clocks up to 12 h apart and set back, agents killed: saving goes on",
        f"{KILL_COUNT} agents killed, {len(times)} steps committed, {len(reported)} dropped, "
        f"{len(set(failed_steps(job)))} raised as failed; went on from {start - 1}",
    )
