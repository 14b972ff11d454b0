"""Asking all hosts of a run for themselves: real servers on loopback, and some that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from holdfast.clock import SystemClock
from holdfast.coordination.messages import Held
from holdfast.coordination.survivability import HostSeen, Known, Lead
from holdfast.errors import InvalidArgumentError
from holdfast.observe.run_status import (
    HostStatus,
    decode_status,
    encode_status,
    job_of,
    read_answers,
)
from holdfast.peers.address import PeerAddress
from holdfast.peers.config import LOOPBACK, listen
from holdfast.peers.directory import PeerDirectory
from holdfast.peers.requests import ANSWER_SECS, ask_all
from holdfast.peers.server import PeerServer, ServedRun
from holdfast.peers.wire import STATUS
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import memory_folder
from tests.engine.stores import ram
from tests.peers import RUN, TOKEN, listening, scripted

CHECKPOINT = checkpoint_id(8)


def status(host: str, rank: int, **changed: object) -> HostStatus:
    said = HostStatus(
        host=host,
        domain=f"rack-{host}",
        version="1",
        pid=7,
        attempt=attempt_id(1),
        leader="a",
        ranks=(rank,),
        ram_bytes=10,
        ram_free_bytes=20,
        held=(Held(CHECKPOINT, 2, False, ((rank, 1),), ((1 - rank, 1),), ()),),
        lead=None,
    )
    return msgspec.structs.replace(said, **changed)


def lead(attempt: int = 1, term: int = 0, **silent_secs: float | None) -> Lead:
    return Lead(
        attempt=attempt_id(attempt),
        term=term,
        rank_count=2,
        hosts=tuple(
            HostSeen(host=host, domain=f"rack-{host}", ranks=((index, 1),), silent_secs=secs)
            for index, (host, secs) in enumerate(silent_secs.items())
        ),
        known=(Known(id=CHECKPOINT, part_count=2, durable=(), is_committed=False),),
        newest_committed=None,
    )


@dataclass
class Hosts:
    """Servers by host; `peers` is how another one knows them."""

    root: Path
    stack: contextlib.ExitStack
    peers: PeerDirectory = field(default_factory=lambda: PeerDirectory(RUN, SystemClock(), TOKEN))

    def add(self, host: str, answer: bytes | None, token: str = TOKEN, secs: float = 0.0) -> None:
        async def said() -> bytes:
            await asyncio.sleep(secs)
            assert answer is not None
            return answer

        served = ServedRun(
            store=ram(self.root),
            run_id=RUN,
            token=token,
            status=said if answer is not None else None,
        )
        server = PeerServer(served, listen(LOOPBACK, 0))
        self.stack.callback(server.close)
        self.peers.update_address(host, server.address)

    def asked(self) -> Mapping[str, HostStatus | str]:
        addresses = {host: one.authority for host, one in self.peers.addresses().items()}
        return read_answers(asyncio.run(ask_all(self.peers, STATUS, "asking")), addresses)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with memory_folder() as folder, contextlib.ExitStack() as stack:
        yield Hosts(Path(folder, "ram"), stack)


def test_every_host_says_of_itself_what_it_knows(hosts: Hosts) -> None:
    said = {"a": status("a", 0, lead=lead(a=0.0, b=None)), "b": status("b", 1)}
    for host, one in said.items():
        hosts.add(host, encode_status(one))
    assert hosts.asked() == said


def test_whoever_does_not_answer_is_told_as_such_and_hides_nobody(hosts: Hosts) -> None:
    """A dead host, a silent one, one of another token, of another name, and one that talks rot."""
    good = status("good", 0)
    hosts.add("good", encode_status(good))
    hosts.add("wrong-token", encode_status(good), token="0" * 32)
    hosts.add("other-name", encode_status(good))
    hosts.add("rot", b'{"host": "rot"}')
    hosts.add("dumb", None)
    hosts.add("slow", encode_status(good), secs=60.0)
    with socket.socket() as closed:
        closed.bind((LOOPBACK, 0))
        hosts.peers.update_address("dead", PeerAddress(LOOPBACK, closed.getsockname()[1]))
        endless = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b" " * (5 << 20)
        silent = hosts.stack.enter_context(
            listening(lambda connection: time.sleep(ANSWER_SECS + 1))
        )
        chatty = hosts.stack.enter_context(scripted(endless))
        hosts.peers.update_address("silent", silent.address)
        hosts.peers.update_address("endless", chatty.address)
        began = time.monotonic()
        answers = hosts.asked()
        assert time.monotonic() - began < ANSWER_SECS + 10
    assert answers.pop("good") == good
    expected = {
        "wrong-token": (
            "it refuses (status 401): expected this run's token, found another one or none"
        ),
        "other-name": "is the agent of host good",
        "rot": "do all hosts run one version?",
        "dumb": "it refuses (status 404)",
        "slow": "it refuses (status 503)",
        "dead": "not reached: Connection refused",
        "silent": "no answer within 3 s",
        "endless": "larger than",
    }
    assert answers.keys() == expected.keys()
    for host, reason in expected.items():
        assert reason in str(answers[host]), host


def test_a_host_without_peers_asks_nobody() -> None:
    assert asyncio.run(ask_all(PeerDirectory(RUN, SystemClock()), STATUS, "a")) == {}


def test_runs_of_ranks_that_are_none_are_refused() -> None:
    rotten = status("a", 0, held=(Held(CHECKPOINT, 2, False, ((0, 1 << 30),), (), ()),))
    with pytest.raises(InvalidArgumentError, match="cannot be decoded"):
        decode_status(msgspec.json.encode(rotten))


def test_all_that_answer_are_put_together() -> None:
    own, other = status("b", 1), status("a", 0, lead=lead(a=0.0, b=0.5))
    job = job_of(own, {"a": other}, {"a": "x:1", "b": "y:2"}, {"a": 0.1})
    assert (job.attempt, job.leader, job.leader_answers, job.rank_count) == (1, "a", True, 2)
    assert job.newest is not None
    assert job.newest == job.newest_in_ram
    assert (job.newest.step, job.newest.domains, job.newest.survives) == (8, 2, 1)
    assert job.newest_durable is None
    assert [(h.host, h.address, h.ranks, h.problem) for h in job.hosts] == [
        ("a", "x:1", (0,), ""),
        ("b", "y:2", (1,), ""),
    ]
    (holding,) = job.hosts[0].holds
    assert (holding.step, holding.own, holding.copies) == (8, (0,), (1,))


def test_a_silent_host_is_shown_with_its_silence_and_not_counted_on() -> None:
    own = status("a", 0, lead=lead(a=0.0, b=12.0))
    job = job_of(own, {"b": "no answer"}, {}, {"b": 30.0})
    (_, lost) = job.hosts
    assert (lost.host, lost.problem, lost.silent_secs) == ("b", "no answer", 12.0)
    assert (lost.domain, lost.ranks, lost.holds) == ("rack-b", (1,), ())
    assert job.newest is not None
    assert job.newest.survives == 0


def test_where_the_leader_does_not_answer_nothing_is_said_of_checkpoints() -> None:
    job = job_of(status("b", 1), {"a": "no answer"}, {"a": "x:1"}, {"a": 3.0})
    assert (job.leader, job.leader_answers, job.newest, job.goes_on_from) == ("a", False, None, ())
    assert [(h.host, h.silent_secs) for h in job.hosts] == [("a", 3.0), ("b", 0.0)]


def test_a_leader_of_an_older_attempt_or_term_is_not_believed() -> None:
    old = status("a", 0, lead=lead(attempt=1, a=0.0))
    new = status("b", 1, attempt=attempt_id(2), leader="b", lead=lead(attempt=2, b=0.0))
    assert job_of(old, {"b": new}, {}, {}).leader == "b"
    # Only an older attempt is known, so the leader of the newest one is not.
    follower = status("b", 1, attempt=attempt_id(2), leader="b")
    assert not job_of(old, {"b": follower}, {}, {}).leader_answers
    first = status("a", 0, lead=lead(term=0, a=0.0, b=0.0))
    later = status("b", 1, lead=lead(term=1, a=0.0, b=0.0))
    assert job_of(first, {"b": later}, {}, {}).leader == "b"


def test_a_host_of_an_earlier_start_that_nobody_hears_of_is_none_of_the_job() -> None:
    own = status("a", 0, lead=lead(a=0.0, b=0.5))
    job = job_of(own, {"b": status("b", 1), "gone": "no answer"}, {}, {})
    assert [host.host for host in job.hosts] == ["a", "b"]
