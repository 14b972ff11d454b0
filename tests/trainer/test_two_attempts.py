"""Two attempts of several hosts: one wins, and an older one that lives on does no harm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import read_attempt
from holdfast.errors import StorageError
from holdfast.peers.address import parse_address
from holdfast.peers.client import PeerAccess
from holdfast.peers.config import read_token
from holdfast.peers.store import PeerStore
from holdfast.store.disk import DiskStore
from tests.hosts import Host, await_events, events, stop, wait_until
from tests.trainer.job import Job, check_went_on, is_committed, start_job

OPTIONS: dict[str, Any] = {"device_count": 1, "interval": 4, "sleep": 0.02}
SOAK_STARTS = 10


def start_two_at_once(first: list[Host], second: list[Host], tmp_path: Path) -> None:
    """Starts two jobs of one run; checks that one wins and the other says which."""
    gate = tmp_path / "gate"
    jobs = [
        start_job(hosts, tmp_path / "run", **OPTIONS, steps=10**6, gate=str(gate))
        for hosts in (first, second)
    ]
    for job in jobs:
        job.await_lines("waits")
    gate.touch()
    wait_until(lambda: any(job.has_ended() for job in jobs))
    winner, loser = sorted(jobs, key=Job.has_ended)
    assert all(rank.wait() for rank in loser.ranks)
    told = [rank.together() for rank in loser.ranks]
    before = len(events(tmp_path / "run", "committed"))
    wait_until(lambda: len(events(tmp_path / "run", "committed")) > before + 1)
    assert not winner.has_ended()
    refusals = [r["message"] for r in told if r.get("error") == "RunBusyError"]
    assert refusals, told
    pids = {str(rank.process.pid) for rank in winner.ranks}
    for refusal in refusals:
        assert pids & set(re.findall(r"rank \d is process (\d+)", refusal)), refusal
    winner.kill()
    assert len(await_events(tmp_path / "run", "attempt_started", count=1)) == 1


@pytest.mark.soak
def test_of_two_attempts_that_start_at_once_one_wins_and_the_other_names_it(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    start_two_at_once(two_hosts, two_hosts[::-1], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(SOAK_STARTS))
def test_one_wins_whichever_host_leads(two_hosts: list[Host], tmp_path: Path, start: int) -> None:
    start_two_at_once(two_hosts, two_hosts[:: -1 if start % 2 else 1], tmp_path)


@contextlib.contextmanager
def standing_still(job: Job, *, with_agents: bool) -> Iterator[None]:
    """The job's processes stand still within, its hosts' agents too where asked; then go on."""
    pids = [rank.process.pid for rank in job.ranks]
    if with_agents:
        pids += [host.agent().pid for host in job.hosts]
    for pid in pids:
        stop(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def check_fenced(job: Job, run: Path, others: list[dict[str, Any]]) -> None:
    """The old ranks could delete nothing, have ended as fenced, and nothing of them came later."""
    codes = [rank.wait(240) for rank in job.ranks]
    told = [rank.together() for rank in job.ranks]
    assert all(codes), told
    # JAX may have ended one of them, because the other one was gone first; or a save that was on
    # its way has failed, which is told first.
    errors = {each["error"] for each in told if "error" in each}
    assert errors, told
    assert errors <= {"FencedError", "ProcessLostError", "SaveFailedError"}, told
    for each in told:
        assert "deleted" not in each
        assert each.get("why", "FencedError") == "FencedError", each
    started = await_events(run, "attempt_started", count=2)[1]["time"]
    late = [e for e in events(run, "committed") if e["attempt"] == 1 and e["time"] > started]
    origin = others[0]["start"] - 1
    assert all(e["step"] <= origin for e in late), (late, origin)
    wanted = {step for each in others for step in each["saved"]}
    assert all(is_committed(run, step, attempt=2) for step in wanted)
    assert is_committed(run, 0), "an old rank has deleted what it had saved"


def test_trainers_that_a_takeover_found_standing_still_can_do_nothing_when_they_go_on(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run, doomed = tmp_path / "run", tmp_path / "doomed"
    old = start_job(two_hosts, run, **OPTIONS, steps=10**6, delete_once=str(doomed))
    wait_until(lambda: is_committed(run, 8))
    with standing_still(old, with_agents=False):
        doomed.touch()
        new = start_job(two_hosts, run, **OPTIONS, steps=9, takeover=True).results()
    check_fenced(old, run, new)


@pytest.mark.soak
def test_hosts_that_were_gone_when_the_next_attempt_began_can_do_nothing_when_they_go_on(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    run, doomed = tmp_path / "run", tmp_path / "doomed"
    # So rare that nothing is on its way to storage, which would tell the old agents at once.
    rare = OPTIONS | {"interval": 40}
    old = start_job(four_hosts[:2], run, **rare, steps=10**6, delete_once=str(doomed))
    wait_until(lambda: is_committed(run, 0))
    with standing_still(old, with_agents=True):
        doomed.touch()
        new = start_job(four_hosts[2:], run, **OPTIONS, steps=9).results()
        check_went_on(new, new[0]["start"] - 1)
    check_fenced(old, run, new)
    assert any(rank.together().get("not_deleted") == 0 for rank in old.ranks)
    check_serves_no_older_attempt(four_hosts[0], run)
    check_serves_no_older_attempt(four_hosts[2], run)


def check_serves_no_older_attempt(host: Host, run: Path) -> None:
    """The host's agent serves those who know of attempt 2, and nobody else once it has heard."""
    assert not is_refused(host, run, attempt=2)
    wait_until(lambda: is_refused(host, run, attempt=1))


def is_refused(host: Host, run: Path, attempt: int) -> bool:
    """Whether one who knows of no newer attempt than that may read nothing there."""
    status = host.agent()
    newest = read_attempt(DiskStore(run, SystemClock()), attempt).attempt
    assert status.peer_address is not None
    access = PeerAccess(
        address=parse_address(status.peer_address),
        run_id=status.run_id,
        token=read_token(str(run / f"agents-{status.run_id}.token")),
        attempt=lambda: newest,
    )
    with contextlib.closing(PeerStore(access, SystemClock())) as peer:
        try:
            list(peer.list("checkpoints"))
        except StorageError as error:
            return f"attempt {attempt} is not served any more" in str(error)
    return False
