"""An agent that is stopped for a while and goes on: drops are raised, and saving goes on."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import SaveFailedError
from holdfast.host.wire import protocol
from holdfast.local_agent import client
from holdfast.local_agent.launch import START_SECS
from tests.hosts import Host, events, stop
from tests.trainer.job import Job, seen, start_job

STOPPED_SECS = 14.0
"""Longer than other hosts count on the RAM of one that is silent."""
RECOVERY_SECS = 240.0
"""A few heartbeats, and what a loaded machine adds."""
OPTIONS: dict[str, Any] = {"device_count": 1, "lockstep": True, "sleep": 0.1, "goes_on": True}


def stop_for_a_while(job: Job, stopped: Host, name: str, secs: float) -> tuple[int, float]:
    """Stops the host's agent; the newest step of that event then, and seconds until the next."""
    job.wait_until(lambda: any(step > 10 for step in seen(job.run, name)))
    pid = stopped.agent().pid
    stop(pid)
    try:
        time.sleep(secs)
    finally:
        os.kill(pid, signal.SIGCONT)
    went_on = time.time()
    newest = max(seen(job.run, name))
    job.wait_until(lambda: max(seen(job.run, name)) > newest + 1, RECOVERY_SECS)
    times = [datetime.fromisoformat(e["time"]) for e in events(job.run, name)]
    return newest, min(t.timestamp() for t in times if t.timestamp() > went_on) - went_on


def skipped_and_replaced(run: Path, name: str) -> set[int]:
    """The steps that a rank skipped for lack of room, below the newest one with that event."""
    skipped = {e["step"] for e in events(run, "dropped") if e["reason"].endswith(protocol.SKIPPED)}
    return {step for step in skipped if step < max(seen(run, name))}


def check(hosts: list[Host], run: Path, stopped: int, secs: float, **todo: Any) -> None:
    name = "committed" if todo["interval"] == 1 else "protected"
    job = start_job(hosts, run, **OPTIONS, **todo, steps=int(secs * 10) + 150)
    before, recovery_secs = stop_for_a_while(job, hosts[stopped], name, secs)
    found = job.results()
    print(f"newest before: {before}, next {name} after {recovery_secs:.2f} s")
    last = int(secs * 10) + 149
    # A loaded machine may skip the last few.
    assert min(r["steps"][-1] for r in found) > last - 20
    for rank, result in zip(job.ranks, found, strict=True):
        failures = rank.said("failed")
        failed = [step for line in failures for step in line["failed"]]
        # Each step that was accepted was complete once, or is named in an error, once; or another
        # rank skipped it for lack of room, and a newer one took its place.
        skipped = skipped_and_replaced(run, name)
        assert set(result["saved"]) - seen(run, "sealed") - skipped <= set(failed)
        assert len(failed) == len(set(failed))
        assert len(failures) <= 3, "many drops are one error"
    assert any(rank.said("failed") for rank in job.ranks)


@pytest.mark.soak
@pytest.mark.parametrize("stopped", [0, 1])
def test_what_is_dropped_while_an_agent_is_stopped_is_raised_and_saving_goes_on(
    two_hosts: list[Host], tmp_path: Path, stopped: int
) -> None:
    check(two_hosts, tmp_path / "run", stopped, STOPPED_SECS, interval=1)


@pytest.mark.soak
def test_checkpoints_in_ram_that_are_dropped_are_raised(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    todo = {"interval": 10**6, "ram_interval": 1}
    check(two_hosts, tmp_path / "run", 1, STOPPED_SECS, **todo)


@pytest.mark.soak
def test_what_was_dropped_is_raised_at_the_end_where_the_training_ends_before_the_agent_goes_on(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start_job(two_hosts, run, **OPTIONS, steps=60, interval=10**6, ram_interval=1)
    job.wait_until(lambda: any(step > 10 for step in seen(run, "protected")))
    pid = two_hosts[1].agent().pid
    stop(pid)
    try:
        job.await_lines("trained")
        time.sleep(STOPPED_SECS)
    finally:
        os.kill(pid, signal.SIGCONT)
    found = job.results()
    (failure,) = job.ranks[0].said("failed")
    assert failure["at_step"] is None
    # What was sealed was complete: then a newer one may be protected before it is.
    assert set(failure["failed"]) == set(found[0]["saved"]) - seen(run, "sealed")
    # Saves that found no free slot meanwhile were refused, and are no drops.
    assert failure["failed"]
    assert "accepted and then dropped" in failure["message"]


@pytest.mark.soak
@pytest.mark.parametrize("stopped", [0, 1])
def test_an_agent_that_is_taken_for_gone_and_goes_on_is_used_again(
    two_hosts: list[Host], tmp_path: Path, stopped: int
) -> None:
    check(two_hosts, tmp_path / "run", stopped, 40.0, interval=1)


def test_a_suspended_agent_is_named_and_what_it_has_not_answered_is_not_confirmed(
    one_host: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, state = tmp_path / "run", {"w": np.arange(1000.0)}
    manager = holdfast.CheckpointManager(run)
    manager.save(0, state, force=True)
    manager.wait_until_finished()
    pid, pulse_secs = one_host.agent().pid, client.PULSE_SECS
    stop(pid)
    try:
        monkeypatch.setattr(client, "PULSE_SECS", 0.5)
        began = time.monotonic()
        assert manager.finish(1, state)
        found = rf"not confirmed.*process {pid} .*suspended.*`kill -CONT {pid}`"
        with pytest.raises(SaveFailedError, match=found):
            manager.close()
        # Less than another agent is given to start, which is no use while this one lives.
        assert time.monotonic() - began < START_SECS
        for command in (["save"], ["rm", "--yes"]):
            arguments = [*command, str(run), *(["0"] if command[0] == "rm" else [])]
            assert main(arguments) == 1
            assert f"kill -CONT {pid}" in capsys.readouterr().err
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(client, "PULSE_SECS", pulse_secs)
    # Whether it has read that its trainer has left is its web server's choice: the connection is
    # closed by then. A process that opens the run again is no second trainer.
    with holdfast.CheckpointManager(run) as again:
        assert 0 in again.all_steps()
        again.resume(state)
        assert again.save(2, state, force=True)
