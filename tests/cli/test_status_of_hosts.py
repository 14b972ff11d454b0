"""`holdfast status` of a run over several hosts, asked on any of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.peers.address import parse_address
from tests.cli.command_line import answer, holdfast
from tests.hosts import Host, events, host, wait_until
from tests.trainer.job import lose, start_job

LAST = 10
"""The last step that is saved to RAM; of the durable tier the first step is."""
TOKEN_FILES = "agents-*.token"


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(host(f"host-{name}")) for name in request.param]


def start(hosts: list[Host], run: Path) -> None:
    """A job whose trainers stay, and save no more."""
    start_job(hosts, run, steps=LAST + 1, interval=10**6, ram_interval=5, stay=True)
    wait_until(lambda: LAST in {e["step"] for e in events(run, "protected")}, 90)
    wait_until(lambda: 0 in {e["step"] for e in events(run, "committed")})


def state(asked: Host) -> dict[str, Any]:
    (found,) = answer(asked, "status")["runs"]
    return found


def survived(asked: Host) -> list[tuple[int | None, int]]:
    return [(one["lost_domains_max"], one["step"]) for one in state(asked)["goes_on_from"]]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["abcd"], indirect=True)
def test_every_host_tells_of_all_and_a_lost_one_is_shown_as_lost(
    hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    start(hosts, run)
    for asked in hosts:
        found = state(asked)
        assert (found["run"], found["attempt"], found["rank_count"]) == (str(run), 1, 4)
        assert (found["leader"], found["leader_answers"]) == ("host-a", True)
        newest = found["newest"]
        assert newest == found["newest_in_ram"]
        assert (newest["step"], newest["durable"], newest["domains"]) == (LAST, False, 2)
        assert found["newest_durable"]["step"] == 0
        assert [one["lost_domains_max"] for one in found["goes_on_from"]] == [1, None]
        for rank, (one, of) in enumerate(zip(found["hosts"], hosts, strict=True)):
            agent = of.agent()
            assert (one["host"], one["domain"], one["ranks"]) == (of.name, of.name, [rank])
            assert agent.peer_address is not None
            serves_at = parse_address(agent.peer_address).authority
            assert (one["address"], one["pid"]) == (serves_at, agent.pid)
            assert (one["problem"], one["ram_bytes"]) == ("", agent.ram_bytes)
            assert one["ram_free_bytes"] > 0
            held = one["holds"][0]
            assert (held["step"], held["own"]) == (LAST, [rank])
            assert len(held["copies"]) == 1
            assert held["copies"] != [rank]
    out = holdfast(hosts[1], "status").stdout
    assert "trainers  4 of 4 live\n" in out
    assert f"survives  1 more lost host, from step {LAST}; any loss, from step 0" in out
    # This host's own agent is told of as ever.
    assert "rank 1: process" in out
    assert all(len(line) <= 100 for line in out.splitlines())

    lose(hosts[2])
    began = time.monotonic()
    found = state(hosts[3])
    assert time.monotonic() - began < 20
    lost = found["hosts"][2]
    assert "not reached" in lost["problem"]
    assert 0 <= lost["silent_secs"] < 30
    assert (lost["ranks"], lost["holds"]) == ([2], [])
    assert survived(hosts[3]) == [(0, LAST), (None, 0)]
    out = holdfast(hosts[3], "status").stdout
    assert "trainers  3 of 4 live\n" in out
    assert "host-c has not answered for " in out
    # Without all of its trainers the run cannot go on, so that its newest checkpoint gets durable.
    wait_until(lambda: survived(hosts[3]) == [(None, LAST)])
    assert f"survives  any loss, from step {LAST}" in holdfast(hosts[3], "status").stdout


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["ab"], indirect=True)
def test_a_stopped_agent_and_one_of_another_token_are_told_in_bounded_time(
    hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    start(hosts, run)
    leader, other = hosts
    pid = leader.agent().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        found = state(other)
        assert time.monotonic() - began < 20
        assert found["hosts"][0]["problem"] == "no answer within 3 s"
        assert found["hosts"][0]["silent_secs"] < 60
        # Until the other host leads, nobody says where the checkpoints stand.
        assert found["leader_answers"] == (found["leader"] == "host-b") == bool(found["newest"])
        wait_until(lambda: state(other)["leader"] == "host-b")
        # That one makes it durable before anything else.
        assert survived(other)[0] in ((0, LAST), (None, LAST))
    finally:
        os.kill(pid, signal.SIGCONT)

    (token,) = run.glob(TOKEN_FILES)
    token.write_text("0" * 32)
    before = other.kill_agent()
    # Its trainer starts another one, which reads the token anew.
    wait_until(lambda: [agent.pid for agent in other.agents()] not in ([], [before]))
    # It asks with a token that is none here, and its word on where it is now is not taken.
    refused, unreached = state(other)["hosts"][0], state(leader)["hosts"][1]
    assert (
        refused["problem"]
        == "it refuses (status 401): expected this run's token, found another one or none"
    )
    assert unreached["problem"].startswith("not reached")
    assert "host-b has not answered" in holdfast(leader, "status").stdout
