"""Hosts that do not reach each other: checkpoints go on, and a preemption ends within its grace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import network
from tests.hosts import events
from tests.trainer.job import check_went_on, run_job, seen, start_job
from tests.trust.figures import tell

GRACE_SECS = 30.0


@pytest.fixture
def net() -> Iterator[network.Network]:
    reason = network.why_not()
    if reason is not None:
        pytest.skip(reason)
    with network.network(2) as made:
        yield made


@pytest.mark.soak
def test_a_preemption_at_the_moment_of_the_cut_ends_within_its_grace_with_its_step(
    net: network.Network, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo: dict[str, Any] = {"device_count": 1, "address": f"{net.uncut_addresses[0]}:7777"}
    todo |= {"lockstep": True, "interval": 10, "sleep": 0.1}
    job = start_job(net.hosts, run, **todo, steps=10**6, goes_on=True, only_closes=True)
    job.wait_until(lambda: len(seen(run, "committed")) >= 2)
    net.cut(1)
    began = time.monotonic()
    for rank in job.ranks:
        os.kill(rank.process.pid, signal.SIGTERM)
    found = job.results(GRACE_SECS)
    secs = time.monotonic() - began
    (left,) = {r["left"] for r in found}
    assert all(r["closed"] and "failed" not in r for r in found), job.told()
    assert left in seen(run, "committed")
    tell(
        "preemption at a cut",
        "ends within a grace of 30 s, its step is kept",
        f"both ranks closed {secs:.1f} s after the signal, step {left} committed",
    )


@pytest.mark.soak
def test_checkpoints_are_committed_and_a_preemption_ends_while_hosts_are_cut_off(
    net: network.Network, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo: dict[str, Any] = {"device_count": 1, "address": f"{net.uncut_addresses[0]}:7777"}
    todo |= {"lockstep": True, "interval": 10, "sleep": 0.1}
    job = start_job(net.hosts, run, **todo, steps=10**6, goes_on=True, only_closes=True)
    job.wait_until(lambda: len(seen(run, "committed")) >= 2)
    net.cut(1)
    job.wait_until(lambda: all(events(run, name) for name in ("host_silent", "leader_changed")))
    before = len(seen(run, "committed"))
    job.wait_until(lambda: len(seen(run, "committed")) > before)
    # Either host misses the other; the one without rank 0 leads its side from then on.
    assert [e["of_host"] for e in events(run, "host_silent")] == ["host-b"]
    assert [e["leader"] for e in events(run, "leader_changed")] == ["host-b"]
    began = time.monotonic()
    for rank in job.ranks:
        os.kill(rank.process.pid, signal.SIGTERM)
    found = job.results(GRACE_SECS)
    secs = time.monotonic() - began
    # The ranks step together, so both stop at one step although no host has agreed on it.
    (left,) = {r["left"] for r in found}
    assert all(r["closed"] and "failed" not in r for r in found), job.told()
    assert left in seen(run, "committed")
    for rank in job.ranks:
        told = "".join(rank.errors)
        assert told.count("has sent nothing for 10 s") + told.count("leads in its place") == 1
        assert f"stopping at step {left} for the preemption: the hosts have not agreed" in told
    tell(
        "preemption in a cut",
        "ends within a grace of 30 s, its step is kept, one warning a host",
        f"both ranks closed {secs:.1f} s after the signal, step {left} committed",
    )
    net.heal(1)
    check_went_on(run_job(net.hosts, run, **todo, steps=1), left)
