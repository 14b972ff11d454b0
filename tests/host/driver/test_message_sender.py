"""Messages between agents: real servers and messengers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest

from holdfast.coordination.messages import (
    AnyMessage,
    HostState,
    Leaving,
    Report,
    WhoHolds,
    encode_message,
)
from holdfast.peers.address import PeerAddress
from holdfast.peers.config import LOOPBACK, listen
from holdfast.peers.sender import WAITING_MAX, MessageSender, Sender
from holdfast.peers.server import PeerServer, ServedRun
from holdfast.peers.tls import PeerTls, client_context, server_context
from holdfast.peers.wire import ADDRESS_HEADER
from tests.attempts import attempt_id
from tests.engine.making import memory_folder
from tests.engine.stores import ram
from tests.peers import RUN, TOKEN, Authority

WAIT_SECS = 20.0


Came = tuple[str, PeerAddress, AnyMessage, dict[str, PeerAddress]]


@dataclass
class Post:
    """An agent's place: its server, and what came."""

    root: Path
    port: int = 0
    token: str = TOKEN
    tls: PeerTls | None = None
    came: list[Came] = field(default_factory=list)
    is_deaf: bool = False

    def __enter__(self) -> Post:
        self.server = PeerServer(
            ServedRun(
                store=ram(self.root),
                run_id=RUN,
                token=self.token,
                tls=server_context(self.tls) if self.tls else None,
                deliver=None if self.is_deaf else lambda *message: self.came.append(message),
            ),
            listen(LOOPBACK, self.port),
        )
        self.address = self.server.address
        return self

    def __exit__(self, *error: object) -> None:
        self.server.close()


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield Path(folder)


@pytest.fixture
def there(root: Path) -> Iterator[Post]:
    with Post(root) as post:
        yield post


@contextlib.asynccontextmanager
async def messenger(
    *, token: str = TOKEN, tls: PeerTls | None = None, run: str = RUN
) -> AsyncIterator[MessageSender]:
    sender = Sender(
        host="host-a",
        address=PeerAddress(LOOPBACK, 4321),
        run_id=run,
        token=token,
        tls=client_context(tls) if tls else None,
    )
    made = MessageSender(sender)
    try:
        yield made
    finally:
        await made.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECS):
        # What is waited for sets no event.
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def leaving(incarnation: int) -> Leaving:
    return Leaving(run=RUN, attempt=attempt_id(1), incarnation=incarnation)


def report(seq: int) -> Report:
    return Report(
        run=RUN,
        attempt=attempt_id(1),
        incarnation=1,
        seq=seq,
        version=1,
        term=0,
        leader_incarnation=1,
        ack=0,
        published=-1,
        is_hello=False,
        state=HostState(group="g", domain="host-a"),
    )


def test_a_message_comes_with_its_sender_and_where_that_is_answered(there: Post) -> None:
    async def run() -> None:
        async with messenger() as own:
            own.update_address("host-b", there.address)
            own.send("host-b", WhoHolds(run=RUN, attempt=attempt_id(3), group="g"))
            await until(lambda: bool(there.came))

    asyncio.run(run())
    sender, address, message, _ = there.came[0]
    assert (sender, address) == ("host-a", PeerAddress(LOOPBACK, 4321))
    assert message == WhoHolds(run=RUN, attempt=attempt_id(3), group="g")


def test_of_reports_that_wait_only_the_newest_is_sent_and_other_messages_keep_their_order(
    there: Post,
) -> None:
    async def run() -> None:
        async with messenger() as own:
            own.update_address("host-b", there.address)
            # Nothing is sent before this task waits for something.
            for number in range(5):
                own.send("host-b", leaving(number))
                own.send("host-b", report(number))
            await until(lambda: len(there.came) == 6)

    asyncio.run(run())
    messages = [message for _, _, message, _ in there.came]
    assert [m.incarnation for m in messages if isinstance(m, Leaving)] == list(range(5))
    assert [m.seq for m in messages if isinstance(m, Report)] == [4]


def test_what_waits_for_one_host_is_bounded(there: Post) -> None:
    async def run() -> None:
        async with messenger() as own:
            own.update_address("host-b", there.address)
            for number in range(3 * WAITING_MAX):
                own.send("host-b", leaving(number))
            await until(lambda: len(there.came) == WAITING_MAX)

    asyncio.run(run())
    assert [m.incarnation for _, _, m, _ in there.came][-1] == 3 * WAITING_MAX - 1


def test_a_host_that_is_not_there_costs_the_message_and_nothing_else(
    root: Path, there: Post
) -> None:
    with Post(root) as gone:
        pass

    async def run() -> None:
        async with messenger() as own:
            own.send("host-c", leaving(0))
            own.update_address("host-b", gone.address)
            own.update_address("host-d", there.address)
            own.send("host-b", leaving(1))
            own.send("host-d", leaving(2))
            await until(lambda: len(there.came) == 1)
            # It has come back elsewhere.
            own.update_address("host-b", there.address)
            await until(lambda: own.is_idle)
            own.send("host-b", leaving(3))
            await until(lambda: len(there.came) == 2)

    asyncio.run(run())
    assert [m.incarnation for _, _, m, _ in there.came] == [2, 3]


@pytest.mark.parametrize("wrong", [{"token": "y" * 32}, {"run": "another"}])
def test_without_the_runs_token_nothing_is_delivered(there: Post, wrong: dict[str, str]) -> None:
    async def run() -> None:
        async with messenger(**wrong) as own:
            own.update_address("host-b", there.address)
            own.send("host-b", leaving(1))
            await until(lambda: own.is_idle)

    asyncio.run(run())
    assert not there.came


HEADERS = {"Authorization": f"Bearer {TOKEN}", ADDRESS_HEADER: "10.0.0.1:80"}
GOOD = encode_message(leaving(1))


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "messages/host-a", HEADERS, GOOD, 204),
        ("GET", "messages/host-a", HEADERS, b"", 405),
        ("PUT", "messages/host-a", HEADERS, GOOD, 405),
        ("POST", "objects/checkpoints", HEADERS, GOOD, 405),
        ("POST", "names/checkpoints", HEADERS, GOOD, 405),
        ("POST", "messages/../x", HEADERS, GOOD, 400),
        ("POST", "messages/host-a", HEADERS, b"{}", 400),
        ("POST", "messages/host-a", HEADERS, b"\xff" * 100, 400),
        ("POST", "messages/host-a", HEADERS | {ADDRESS_HEADER: "nowhere"}, GOOD, 400),
        ("POST", "messages/host-a", HEADERS | {"Authorization": ""}, GOOD, 401),
    ],
)
def test_what_is_no_message_is_refused(
    there: Post, method: str, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    async def run() -> int:
        url = f"http://{there.address}/{RUN}/{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, aiohttp.client.URL(url, encoded=True), data=body or None, headers=headers
            ) as answer,
        ):
            return answer.status

    assert asyncio.run(run()) == status
    assert len(there.came) == (status == 204)


def test_a_message_without_end_is_not_read_to_its_end(there: Post) -> None:
    head = [f"POST /{RUN}/messages/host-a HTTP/1.1", "Host: host-b", "Transfer-Encoding: chunked"]
    head += [f"{name}: {value}" for name, value in HEADERS.items()]
    piece = b"10000\r\n" + b"[" * 65536 + b"\r\n"
    where = (there.address.host, there.address.port)
    with (
        socket.create_connection(where, WAIT_SECS) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        deadline = time.monotonic() + WAIT_SECS
        while time.monotonic() < deadline:
            connection.sendall(piece)
        pytest.fail("all of it was taken")
    assert not there.came


def test_a_server_without_an_agreement_takes_no_messages(root: Path) -> None:
    async def run(deaf: Post) -> None:
        async with messenger() as own:
            own.update_address("host-b", deaf.address)
            own.send("host-b", leaving(1))
            await until(lambda: own.is_idle)

    with Post(root, is_deaf=True) as deaf:
        asyncio.run(run(deaf))
        assert not deaf.came


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the openssl command makes the certificates"
)
def test_messages_pass_through_mutual_tls(root: Path, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "own"), Authority(tmp_path / "other")
    tls = authority.issue("agent")

    async def run(there: Post) -> None:
        async with messenger(tls=tls) as own, messenger(tls=other.issue("agent")) as stranger:
            stranger.update_address("host-b", there.address)
            stranger.send("host-b", leaving(1))
            await until(lambda: stranger.is_idle)
            own.update_address("host-b", there.address)
            own.send("host-b", leaving(2))
            await until(lambda: bool(there.came))

    with Post(root, tls=tls) as there:
        asyncio.run(run(there))
        assert [m.incarnation for _, _, m, _ in there.came] == [2]


def test_closing_ends_what_is_being_sent() -> None:
    async def run() -> None:
        # Takes the connection, and never answers.
        taken: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _, writer: taken.append(writer), LOOPBACK, 0)
        port = silent.sockets[0].getsockname()[1]
        async with messenger() as own:
            own.update_address("host-b", PeerAddress(LOOPBACK, port))
            own.send("host-b", leaving(1))
            await until(lambda: bool(taken))
            assert not own.is_idle
        assert own.is_idle
        for writer in taken:
            writer.close()
            await writer.wait_closed()
        silent.close()
        await silent.wait_closed()

    asyncio.run(run())


def test_a_message_is_json_that_anybody_can_read() -> None:
    assert json.loads(GOOD) == msgspec.to_builtins(leaving(1)) | {"message": "Leaving"}
