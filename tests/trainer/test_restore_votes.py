"""Ranks vote on each try to restore; one that fails or is gone ends the restore for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.adapt.contract import OwnProcess
from holdfast.clock import SystemClock
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.host.wire.protocol import Notice
from holdfast.trainer.ranks.rendezvous import Rendezvous
from holdfast.trainer.restore.restore_votes import Ballot, RestoreVerdict, Votes, verdict
from tests.attempts import checkpoint_id
from tests.hosts import Host, host
from tests.ports import free_address
from tests.trainer.ranks import MemoryWords, ranks, together
from tests.trainer.test_processes import DEVICES, PROCESS, results, start_job

OLD, NEW = checkpoint_id(3), checkpoint_id(5, 2)
GONE_SECS = 60.0
"""The others would wait for an hour."""


@pytest.mark.parametrize(
    ("ballots", "expected"),
    [
        ([(True, NEW)], (True, 5)),
        ([(False, NEW)], (False, 5)),
        ([(True, None)], (True, -1)),
        ([(True, NEW), (True, NEW), (True, NEW)], (True, 5)),
        ([(True, NEW), (False, NEW)], (False, 5)),
        # One rank sees an older one as the newest: all try that one next.
        ([(True, NEW), (True, OLD)], (False, 4)),
        ([(False, NEW), (True, OLD)], (False, 4)),
        # One step of two attempts is no agreement.
        ([(True, checkpoint_id(5)), (True, NEW)], (False, 6)),
        # Nor of two attempts with one number.
        ([(True, CheckpointId(5, AttemptId(2, "0" * 8))), (True, NEW)], (False, 6)),
        # One rank sees nothing at all.
        ([(True, NEW), (True, None)], (False, 0)),
        ([(True, None), (True, None)], (True, -1)),
    ],
)
def test_only_what_all_ranks_restored_is_good(
    ballots: list[tuple[bool, CheckpointId | None]], expected: tuple[bool, int]
) -> None:
    assert verdict([Ballot(*ballot) for ballot in ballots]) == RestoreVerdict(*expected)


def test_a_process_alone_votes_by_itself() -> None:
    rounds = Votes(Rendezvous(OwnProcess(), SystemClock()))
    assert rounds.vote(True, checkpoint_id(5, 2)) == (True, 5)
    assert rounds.vote(False, checkpoint_id(5, 2)) == (False, 5)
    assert rounds.vote(True, None) == (True, -1)


def test_ranks_that_vote_get_one_verdict() -> None:
    job = [Votes(one) for one in ranks(MemoryWords(), 3)]
    told = together([lambda one=one: one.vote(one.rank != 1, checkpoint_id(5, 2)) for one in job])
    assert told == [(False, 5)] * 3
    told = together([lambda one=one: one.vote(True, checkpoint_id(3)) for one in job])
    assert told == [(True, 3)] * 3


@pytest.mark.parametrize(
    ("notice", "kind"),
    [
        (Notice(kind="gone", reason="rank 1 has ended", data="group"), errors.ProcessLostError),
        (Notice(kind="fenced", reason="rank 1 has ended", data="group"), errors.FencedError),
    ],
)
def test_a_vote_ends_when_the_agent_tells_that_a_rank_is_gone(
    notice: Notice, kind: type[errors.HoldfastError]
) -> None:
    first = Votes(ranks(MemoryWords(), 2)[0])
    # Of the processes that had the run before these.
    for gone in ("gone", "fenced"):
        first.on_notice(Notice(kind=gone, reason="before", data="another group"), "group")
    assert first._trouble is None
    first.on_notice(notice, "group")
    with pytest.raises(kind, match="rank 1 has ended"):
        first.vote(True, checkpoint_id(5, 2))


def line_of(process: subprocess.Popen[str], key: str) -> dict:
    """The first line in which a process says `key`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and key in (said := json.loads(line)):
            return said
    raise AssertionError(f"the process has ended and did not say {key!r}")


def start_on(hosts: list[Host], run: Path, **todo: object) -> list[subprocess.Popen[str]]:
    """One process on each host."""
    address, text = free_address(), json.dumps(todo)
    return [
        one.start(PROCESS, address, len(hosts), rank, run, text, stem="jax", XLA_FLAGS=DEVICES)
        for rank, one in enumerate(hosts)
    ]


def test_a_process_that_dies_during_a_restore_ends_it_for_the_others_in_seconds(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, steps=1, interval=1))
    job = start_job(one_host, run, 2, steps=1, absent=1)
    pid = line_of(job[1], "absent")["absent"]
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    said = line_of(job[0], "error")
    assert said["error"] == "ProcessLostError"
    assert f"rank 1 (process {pid} on host {one_host.name}) has ended" in said["message"]
    assert time.monotonic() - started < GONE_SECS


@pytest.mark.soak
def test_a_process_on_another_host_that_dies_during_a_restore_ends_it_in_seconds(
    one_host: Host, tmp_path: Path
) -> None:
    with host("host-b") as other:
        hosts = [one_host, other]
        results(start_on(hosts, tmp_path / "run", steps=1, interval=1))
        job = start_on(hosts, tmp_path / "run", steps=1, absent=1)
        os.kill(line_of(job[1], "absent")["absent"], signal.SIGKILL)
        started = time.monotonic()
        said = line_of(job[0], "error")
        assert said["error"] == "ProcessLostError"
        assert "rank 1 on host host-b ended without closing the manager" in said["message"]
        assert time.monotonic() - started < GONE_SECS


def test_a_job_whose_rank_0_dies_during_a_restore_does_not_go_on(
    one_host: Host, tmp_path: Path
) -> None:
    """JAX's service dies with it, and JAX then ends the other processes by itself."""
    job = start_job(one_host, tmp_path / "run", 2, steps=1, absent=0)
    os.kill(line_of(job[0], "absent")["absent"], signal.SIGKILL)
    out, _ = job[1].communicate(timeout=2 * GONE_SECS)
    assert job[1].returncode != 0 or "ProcessLostError" in out
    assert "start" not in out


@pytest.mark.soak
def test_a_state_that_does_not_fit_on_one_rank_is_told_on_all(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, steps=1, interval=1))
    job = start_job(one_host, run, 2, steps=1, other_like=1)
    said = [line_of(process, "error") for process in job]
    assert [each["error"] for each in said] == ["StructureMismatchError"] * 2
    assert all("another" in each["message"] for each in said)
    assert said[0]["message"] == f"rank 1: {said[1]['message']}"
