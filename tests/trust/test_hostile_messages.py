"""Hostile messages to an agent: each is answered or refused, and the agent serves on.

The agent is the real service over the real stores, in this process; the routes are on a real Unix
socket. What the messages did is undone by nothing: after all of them a trainer saves and restores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.host.service import call_server
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import GROUP, WORDS
from holdfast.host.wire.client import AgentClient
from holdfast.local_agent.calls import decoded
from holdfast.local_agent.client import AgentGoneError
from holdfast.local_agent.http_format import BODY_SIZE_MAX_BYTES
from holdfast.local_agent.place import SOCKET, socket_address
from tests.engine.making import memory_folder
from tests.hosts import host, is_running, wait_until
from tests.trust.damaged_run import told_on_failure
from tests.trust.hostile_inputs import MESSAGES, mutated_bytes, spoilt_message
from tests.trust.in_process import InProcessHost, in_process_host, read_checkpoint, right_array

SEED = 20260801
WAIT_SECS = 0.02
ANSWER_SECS = 20.0
# They end the agent, or wait for hours on purpose.
LEFT_OUT = ("stop",)
WAITING = ("watch", "attach", "branch", "request")
"""A watch waits for what happens, the others until all ranks have come."""


@pytest.fixture
def agent() -> Iterator[InProcessHost]:
    with memory_folder() as root, in_process_host(Path(root)) as made:
        made.start_agent()
        yield made


def assert_serves(agent: InProcessHost) -> None:
    """A new trainer attaches, saves, and what it saved is right."""
    trainer = agent.attach(takeover=True)
    for step in (1000, 1001):
        saved = agent.save(trainer, step)
        agent.settle()
        view = agent.look()
        assert view.timeline[-1] == saved
        said, array = read_checkpoint(view.sources(saved))
        assert said == saved
        assert np.array_equal(array, right_array(saved))


async def _answered(agent: InProcessHost, name: str, data: bytes) -> str:
    """What the route of that name makes of a message; the routes do the same."""
    assert agent.service is not None
    handlers = {"slot": "want_slot", "request": "request_save"}
    handler = getattr(agent.service, handlers.get(name, name))
    try:
        message = decoded(name, data, type(MESSAGES[name]))
        group = agent.agent.trainers.group
        if name == "branch" and group is not None and message.rank not in group.members:
            return "left out"
        # Others do not wait; to cut one short would be what no client can do.
        secs = WAIT_SECS if name in WAITING else ANSWER_SECS
        answer = await asyncio.wait_for(handler(message, os.getpid()), secs)
        msgspec.json.encode(answer)
    except HoldfastError as error:
        return type(error).__name__
    except TimeoutError:
        assert name in WAITING
        return "waits"
    return "answered"


def _group(**changes: int) -> bytes:
    member = {"rank": 0, "seat": 0, "pid": 1, "started": 1.0} | changes
    return json.dumps(
        {"group": "g", "attempt": [1, "00000001"], "count": 1, "members": [member]}
    ).encode()


def messages(agent: InProcessHost, seed: int, count: int) -> Counter[str]:
    """Gives the service `count` spoilt messages of all routes."""
    seen: Counter[str] = Counter()
    names = [name for name in MESSAGES if name not in LEFT_OUT]
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        name = rng.choice(names)
        data = spoilt_message(rng, name)
        with told_on_failure(f"seed {seed}, message {number}: /{name} {data[:2000]!r}"):
            if agent.agent.trainers.group is None:
                sound = msgspec.json.encode(MESSAGES["attach"])
                agent.call(_answered(agent, "attach", sound))
            seen[agent.call(_answered(agent, name, data))] += 1
    return seen


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.soak)])
def test_spoilt_messages_are_refused_and_the_agent_serves_on(
    agent: InProcessHost, count: int
) -> None:
    seen = messages(agent, SEED, count)
    assert seen["InvalidArgumentError"] > count / 5
    assert seen["answered"] > count / 20
    assert_serves(agent)


READ = {"event": "read", "step": 1, "attempt": 1, "rank": 0, "sources": {}, "secs": 0.1}
BOUNDS = {
    "a negative rank": ("slot", {"rank": -1}),
    "a rank that no job has": ("slot", {"rank": 10**6}),
    "a size that overflows": ("slot", {"size_bytes": 2**63}),
    "a negative size": ("slot", {"size_bytes": -1}),
    "a negative step": ("sealed", {"id": [-1, [1, "00000001"]]}),
    "a step beyond the last": ("sealed", {"id": [10**15 + 1, [1, "00000001"]]}),
    "an attempt beyond the last": ("sealed", {"id": [1, [10**9, "00000001"]]}),
    "an attempt without a number": ("sealed", {"id": [1, 1]}),
    "an attempt named by a path": ("sealed", {"id": [1, [1, "../../.."]]}),
    "no parts": ("sealed", {"part_count": 0}),
    "too many parts": ("sealed", {"part_count": 10**6 + 1}),
    "an unknown tier": ("sealed", {"tier": "../durable"}),
    "no processes": ("attach", {"count": 0}),
    "a negative limit": ("attach", {"ram_limit_bytes": -1}),
    "a negative time": ("attach", {"linger_secs": -1.0}),
    "a time that is no number": ("attach", {"linger_secs": "nan"}),
    "a policy that is none": ("attach", {"durable": {"save": "{", "preserve": None}}),
    "a cursor that overflows": ("watch", {"cursor": 2**64}),
    "an event that there is not": ("report", {"event": {"event": "x"}}),
    "an event of the agent": ("report", {"event": {"event": "trainer_lost", "rank": 0, "pid": 1}}),
    "a step that is no number": ("report", {"event": READ | {"step": "x"}}),
    "bytes that are negative": ("report", {"event": READ | {"sources": {"ram": -1}}}),
    "an id of a file": ("delete", {"ids": [["../../x", 1]]}),
}


@pytest.mark.parametrize(("name", "changes"), BOUNDS.values(), ids=BOUNDS)
def test_what_no_trainer_means_is_refused(
    agent: InProcessHost, name: str, changes: dict[str, object]
) -> None:
    tree = json.loads(msgspec.json.encode(MESSAGES[name])) | changes
    data = json.dumps(tree).encode()
    assert agent.call(_answered(agent, name, data)) == "InvalidArgumentError"


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"null", b"[]", b"\xff", b'{"group":"\xff"}', b"[" * 100_000, b"9" * 100_000),
        b'{"group":"g","rank":0,"cursor":0,"cursor":-1}',
    ],
)
def test_a_body_that_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="/watch: not a Watch"):
        decoded("/watch", data, protocol.Watch)


def test_a_branch_of_a_rank_that_never_attached_is_refused_and_begins_nothing(
    agent: InProcessHost,
) -> None:
    trainer = agent.attach()
    request = protocol.Branch(group=trainer.group, rank=7, attempt=trainer.attempt, origin=None)
    assert agent.service is not None
    with pytest.raises(HoldfastError):
        agent.call(agent.service.branch(request, trainer.process.pid))
    assert trainer.attempt == agent.agent.trainers.group.attempt


# The agent's own files, in its folder in memory.

GROUPS: dict[str, bytes | None] = {
    "nothing": b"",
    "cut off": b'{"group":"g","attempt":[1,"00000001"],"cou',
    "another type": b"[]",
    "no UTF-8": b'{"group":"\xff","attempt":[1,"00000001"],"count":1,"members":[]}',
    "deep": b'{"x":' + b"[" * 100_000,
    "a folder": None,
    "no members": b'{"group":"g","attempt":[1,"00000001"],"count":1,"members":[]}',
    "a pid below 0": _group(pid=-5),
    "a pid beyond all": _group(pid=2**70),
    "the pid of init": _group(pid=1),
    "a seat beyond all": _group(seat=10**30),
    "a rank below 0": _group(rank=-1),
}


@pytest.mark.parametrize("name", GROUPS)
def test_an_agent_starts_whatever_stands_in_its_groups_file(tmp_path: Path, name: str) -> None:
    with memory_folder() as root, in_process_host(Path(root)) as made:
        path, data = made.folder / GROUP, GROUPS[name]
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)
        made.start_agent()
        assert_serves(made)


@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_an_agent_starts_whatever_stands_in_its_words(tmp_path: Path, size: int) -> None:
    with memory_folder() as root, in_process_host(Path(root)) as made:
        (made.folder / WORDS).write_bytes(random.Random(SEED).randbytes(size))
        made.start_agent()
        assert_serves(made)


# Over the socket.


@contextlib.asynccontextmanager
async def serving(agent: InProcessHost, body_secs: float) -> AsyncIterator[Path]:
    """The agent's routes on a Unix socket, and where that is."""
    assert agent.service is not None
    path = agent.folder / "test.sock"
    server = call_server(agent.service, body_secs)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    await server.start(listener)
    try:
        yield path
    finally:
        await server.close(grace_secs=0.2)
        path.unlink()


async def exchange(path: Path, data: bytes, secs: float = ANSWER_SECS) -> bytes:
    """Sends bytes and returns what comes back first; nothing where that takes longer."""
    reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            return await asyncio.wait_for(reader.read(1 << 16), secs)
        return b""
    except TimeoutError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(name: str, body: bytes, *headers: bytes, method: bytes = b"POST") -> bytes:
    """A request as bytes."""
    lines = [method + b" /" + name.encode() + b" HTTP/1.1", b"Host: agent", *headers]
    if not any(header.lower().startswith((b"content-length", b"transfer")) for header in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


STATUS = request("status", b"{}", b"Connection: close")
BAD_HTTP = {
    "no HTTP": (b"hello\r\n\r\n", b" 400 "),
    "no such route": (request("etc/passwd", b"{}"), b" 404 "),
    "a path that climbs": (request("../../etc/passwd", b"{}"), b" 404 "),
    "another method": (request("status", b"{}", method=b"GET"), b" 405 "),
    "a method that is none": (request("status", b"{}", method=b"\x00\xff"), b" 400 "),
    "a negative length": (request("status", b"{}", b"Content-Length: -1"), b" 400 "),
    "a length that is no number": (request("status", b"{}", b"Content-Length: x"), b" 400 "),
    "a length that overflows": (
        request("status", b"{}", b"Content-Length: 99999999999999999999"),
        b" 400 ",
    ),
    "two lengths": (request("status", b"{}", b"Content-Length: 2", b"Content-Length: 9"), b" 400 "),
    "length and chunks": (
        request("status", b"0\r\n\r\n", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        b" 400 ",
    ),
    "a chunk that is none": (
        request("status", b"zz\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
        b" 400 ",
    ),
    "headers without end": (b"POST /status HTTP/1.1\r\n" + b"X: " + b"y" * 100_000, b" 400 "),
    "deep JSON": (request("status", b"[" * 200_000), b" 400 "),
    "no UTF-8": (request("watch", b'{"group":"\xff","rank":0,"cursor":0}'), b" 400 "),
}


@pytest.mark.parametrize(("data", "status"), BAD_HTTP.values(), ids=BAD_HTTP)
def test_bad_http_is_refused_and_the_next_request_is_answered(
    agent: InProcessHost, data: bytes, status: bytes
) -> None:
    async def both() -> tuple[bytes, bytes]:
        async with serving(agent, body_secs=2.0) as path:
            return await exchange(path, data), await exchange(path, STATUS)

    found, after = agent.call(both())
    assert status in found[:20]
    assert b"HTTP/1.1 200 OK" in after


def test_a_body_larger_than_any_message_is_refused_unread(agent: InProcessHost) -> None:
    async def try_it() -> bytes:
        async with serving(agent, body_secs=2.0) as path:
            length = b"Content-Length: %d" % (BODY_SIZE_MAX_BYTES * 1000)
            # What is over the limit has to come before it is over.
            return await exchange(path, request("status", b"{}" + b" " * 10**6, length))

    assert b" 400 " in agent.call(try_it())[:20]


def test_a_body_that_never_comes_is_not_waited_for(agent: InProcessHost) -> None:
    async def try_it() -> bytes:
        async with serving(agent, body_secs=0.2) as path:
            return await exchange(path, request("status", b"{", b"Content-Length: 100"))

    found = agent.call(try_it())
    assert b" 400 " in found[:20]
    assert b"did not arrive within 0.2 s" in found


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.soak)])
def test_spoilt_requests_leave_the_agent_serving(agent: InProcessHost, count: int) -> None:
    seen: Counter[str] = Counter()

    async def send(path: Path, number: int) -> None:
        rng = random.Random(f"{SEED} request {number}")
        name = rng.choice([n for n in MESSAGES if n not in (*LEFT_OUT, "branch", "watch")])
        data = mutated_bytes(rng, request(name, spoilt_message(rng, name)))
        # Endless headers keep only their own sender waiting.
        found = await exchange(path, data, secs=1.0)
        assert b" 500 " not in found[:20], f"seed {SEED}, request {number}: {data!r}"
        seen[found[9:12].decode() or "none"] += 1

    async def send_all() -> None:
        async with serving(agent, body_secs=0.2) as path:
            for first in range(0, count, 50):
                await asyncio.gather(*(send(path, n) for n in range(first, first + 50)))
            assert b" 200 " in (await exchange(path, STATUS))[:20]

    agent.call(send_all())
    assert_serves(agent)
    assert set(seen) >= {"200", "400", "none"}


def _slow_connections(folder: Path, count: int) -> Iterator[socket.socket]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        for number in range(count):
            made = socket.socket(socket.AF_UNIX)
            made.connect(socket_address(fd))
            made.sendall([b"", b"POST /stat", STATUS[:-2], STATUS[:-1]][number % 4])
            yield made
    finally:
        os.close(fd)


def test_slow_connections_hold_nobody_up_and_the_agent_leaves_in_spite_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host() as own, contextlib.ExitStack() as stack:
        monkeypatch.setenv("HOLDFAST_RAM", str(own.folder))
        monkeypatch.setenv("HOLDFAST_HOST", own.name)
        state = {"w": np.arange(1000.0)}
        ram = holdfast.RamTier(linger_secs=0)
        with holdfast.CheckpointManager(tmp_path / "run", ram=ram) as manager:
            status = own.agent()
            folder = Path(status.folder)
            for slow in _slow_connections(folder, 100):
                stack.enter_context(contextlib.closing(slow))
            assert manager.save(1, state, force=True) or manager.save(2, state, force=True)
            manager.wait_until_finished(timeout_secs=60)
            assert own.agent().pid == status.pid
        client = AgentClient(folder, timeout_secs=ANSWER_SECS)
        with contextlib.suppress(AgentGoneError, HoldfastError):
            client.call("stop", protocol.Stop(), protocol.Empty)
        client.close()
        wait_until(lambda: not is_running(status.pid), 30.0)
        assert not (folder / SOCKET).exists()
