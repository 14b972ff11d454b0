"""Two jobs on two hosts that start one run in a bucket at the same time: exactly one trains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.store.location import open_durable
from tests.buckets import racing_trainer
from tests.hosts import Host, host
from tests.said import Said

SCRIPT = Path(racing_trainer.__file__)


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    """Hosts that share nothing but the bucket."""
    with ExitStack() as stack:
        found = [stack.enter_context(host(name)) for name in ("host-a", "host-b")]
        for one in found:
            one.variables["HOLDFAST_STATE"] = str(one.folder / "state")
        yield found


def race(hosts: list[Host], url: str, folder: Path, attempt: int) -> None:
    """Starts a job on each host at once; checks that one trains, and the other one names it."""
    folder.mkdir()
    gate, end = folder / "gate", folder / "end"
    both = [Said(one.start(SCRIPT, url, gate, end, stem="numpy")) for one in hosts]
    try:
        for one in both:
            one.await_line("waits")
        gate.touch()
        # Each ends with an error, or saves and waits.
        for one in both:
            one.await_line("outcome")
    finally:
        end.touch()
        for one in both:
            one.finish()
    told = [one.together() for one in both]
    winners = [place for place, line in enumerate(told) if "saved" in line]
    assert len(winners) == 1, told
    (winner,) = winners
    loser = told[1 - winner]
    assert "error" not in told[winner], told
    assert loser["error"] == "RunBusyError", told
    assert hosts[winner].name in loser["message"]
    assert re.search(rf"\b{both[winner].process.pid}\b", loser["message"]), loser
    store = open_durable(url, SystemClock())
    assert max(read_attempts(store)) == attempt
    with holdfast.open_run(url) as run:
        saved = told[winner]["saved"]
        assert run.all_steps()[-2:] == [saved, saved + 1]
        for step in run.all_steps()[-2:]:
            assert (run.restore(step)["w"] == both[winner].process.pid).all()


def test_of_two_jobs_that_start_at_once_on_two_hosts_one_trains(
    two_hosts: list[Host], url: str, tmp_path: Path
) -> None:
    race(two_hosts, url, tmp_path / "new", attempt=1)


@pytest.mark.soak
def test_one_trains_however_often_two_start_at_once(
    two_hosts: list[Host], url: str, tmp_path: Path
) -> None:
    for attempt in range(1, 11):
        race(two_hosts[:: (-1) ** attempt], url, tmp_path / str(attempt), attempt)
