"""Check what an agent serves to which peers, and what misbehaving peers can cost."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from holdfast.clock import SystemClock
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.peers.address import PeerAddress
from holdfast.peers.config import LOOPBACK, listen, read_token
from holdfast.peers.server import PeerServer
from holdfast.peers.server_connections import PeerLimits
from holdfast.store.ram import RamStore
from holdfast.store.slots import SLOTS, SlotPool
from holdfast.testing.store_bytes import content
from tests.engine.making import memory_folder
from tests.engine.stores import ram
from tests.hosts import wait_until
from tests.peers import RUN, TOKEN, reaching, serving

SIZE = 12 << 20
RECORD = "checkpoints/000000010.1-00000001/part-00000-of-00001.json"
IMAGE = "checkpoints/000000010.1-00000001/image-00000-of-00001.safetensors"
LIMITS = PeerLimits(connection_count_max=8, idle_secs=1.0, piece_secs=1.0)
WAIT_SECS = 20.0


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield Path(folder, "ram")


@pytest.fixture
def own(root: Path) -> Iterator[RamStore]:
    """A RAM tier with an image and a record, and files beside it that must not be served."""
    with contextlib.closing(ram(root)) as store:
        store.put(IMAGE, content(SIZE, 1))
        store.put(RECORD, b"record")
        (root.parent / "agent.json").write_text("secret")
        (root / ".hidden").write_text("secret")
        (root / "checkpoints" / "link").symlink_to(root.parent)
        yield store


@pytest.fixture
def server(root: Path, own: RamStore) -> Iterator[PeerServer]:
    with serving(root, LIMITS) as made:
        yield made


def connected(server: PeerServer) -> socket.socket:
    made = socket.create_connection((LOOPBACK, server.address.port), timeout=WAIT_SECS)
    made.settimeout(WAIT_SECS)
    return made


def told(server: PeerServer, request: bytes) -> bytes:
    """Return all that the server sends on these bytes, until it closes or stops sending."""
    with connected(server) as made:
        made.sendall(request)
        return all_of(made)


def all_of(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            data += more
    return data


def request(target: str, *headers: str, method: str = "GET", token: str = TOKEN) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: a", f"Authorization: Bearer {token}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def objects(key: str) -> str:
    return f"/{RUN}/objects/{key}"


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def assert_serves(server: PeerServer) -> None:
    with reaching(server.address) as peer:
        assert peer.get(IMAGE) == content(SIZE, 1)


# Clients that get an answer.

BAD_TOKENS = {
    "none": b"",
    "empty": b"Authorization: Bearer \r\n",
    "wrong": b"Authorization: Bearer " + b"0" * 32 + b"\r\n",
    "cut": b"Authorization: Bearer " + TOKEN[:-1].encode() + b"\r\n",
    "longer": b"Authorization: Bearer " + TOKEN.encode() + b"0\r\n",
    "upper case": b"Authorization: Bearer " + TOKEN.upper().encode() + b"\r\n",
    "no scheme": b"Authorization: " + TOKEN.encode() + b"\r\n",
    "another scheme": b"Authorization: Basic " + TOKEN.encode() + b"\r\n",
    "not ASCII": b"Authorization: Bearer \xff\xfe\xc3\xa9\r\n",
    "in another header": b"Cookie: " + TOKEN.encode() + b"\r\n",
}


@pytest.mark.parametrize("header", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_without_the_token_nothing_is_told(server: PeerServer, header: bytes) -> None:
    answers = {
        # An object that is there, one that is not, another run, nonsense: all the same.
        re.sub(
            rb"Date: [^\r]*",
            b"",
            told(
                server, b"GET %s HTTP/1.1\r\nHost: a\r\n%sConnection: close\r\n\r\n" % (t, header)
            ),
        )
        for t in (
            objects(IMAGE).encode(),
            objects("no").encode(),
            f"/{RUN}/status/host-a".encode(),
            b"/other/objects/a",
            b"/x",
        )
    }
    (answer,) = answers
    assert status_of(answer) == 401
    assert b"WWW-Authenticate: Bearer" in answer
    assert b"checkpoints" not in answer
    assert TOKEN.encode() not in answer


def test_the_same_request_with_the_token_is_answered(server: PeerServer) -> None:
    answer = told(server, request(objects(IMAGE)))
    assert status_of(answer) == 200
    assert body_of(answer) == content(SIZE, 1)


def test_another_run_is_refused_and_says_so(server: PeerServer) -> None:
    for kind in ("objects", "names", "status"):
        answer = told(server, request(f"/another-run/{kind}/checkpoints"))
        assert status_of(answer) == 404
        assert RUN.encode() in body_of(answer)
        assert b"another-run" in body_of(answer)
    with (
        reaching(server.address, run="another-run") as peer,
        pytest.raises(StorageError, match=f"serves run {RUN}"),
    ):
        list(peer.list("checkpoints"))
    with (
        reaching(server.address, token="0" * 32) as peer,
        pytest.raises(StorageError, match=r"401.*token"),
    ):
        list(peer.list("checkpoints"))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MKCOL"])
def test_nothing_but_reading_is_done(server: PeerServer, own: RamStore, method: str) -> None:
    for more in ((), ("Content-Length: 5",), ("Transfer-Encoding: chunked",)):
        answer = told(server, request(objects(RECORD), *more, method=method) + b"5\r\nwrong\r\n")
        assert status_of(answer) in (400, 405)
    assert status_of(told(server, request(objects(RECORD), "Content-Length: 5") + b"wrong")) == 405
    assert own.get(RECORD) == b"record"
    assert_serves(server)


# What can be named.

OUTSIDE = [
    *(
        "../agent.json",
        "..",
        ".",
        "../../../../../../../../etc/passwd",
        "checkpoints/../../agent.json",
    ),
    *("/etc/passwd", "//etc/passwd", "", "checkpoints/", "checkpoints//x", ".hidden"),
    *("checkpoints/.hidden", "checkpoints/./x", "checkpoints/link/agent.json", "agent.json\0"),
    *("checkpoints/link", "..\\agent.json", "%2e%2e/agent.json", f"{SLOTS}", f"{SLOTS}/x"),
]


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_path_outside_is_refused_however_it_is_written(server: PeerServer, key: str) -> None:
    spellings = {key, quote(key, safe=""), quote(quote(key, safe=""), safe="")}
    spellings |= {"".join(f"%{byte:02X}" for byte in key.encode())}
    spellings |= {key.replace("..", "%2e%2e"), key.replace("/", "%2f"), key.replace(".", "%2E")}
    for spelling in spellings - {s for s in spellings if "\0" in s}:
        for kind in ("objects", "names"):
            answer = told(server, request(f"/{RUN}/{kind}/{spelling}"))
            empty = kind == "names" and body_of(answer) == b'{"objects":[]}'
            assert status_of(answer) in (400, 404, 503) or empty, spelling
            assert b"secret" not in answer
            assert b"root:" not in answer
    assert_serves(server)


def test_a_name_is_decoded_once(server: PeerServer, own: RamStore) -> None:
    names = ["a%62", "a%2562", "ab", "a b", "a?b", "a#b", "a+b", "ä"]
    for number, name in enumerate(names):
        own.put(f"checkpoints/{name}", b"%d" % number)
    with reaching(server.address) as peer:
        for number, name in enumerate(names):
            assert peer.get(f"checkpoints/{name}") == b"%d" % number


def test_slots_are_no_objects(server: PeerServer, root: Path) -> None:
    (slot,) = (root / SLOTS).iterdir()
    assert status_of(told(server, request(objects(f"{SLOTS}/{slot.name}")))) == 404
    assert status_of(told(server, request(f"/{RUN}/names/{SLOTS}"))) == 404


ODD_TARGETS = [
    *("*", "/", "//", f"/{RUN}", f"/{RUN}/objects", f"/{RUN}/objects/", f"/{RUN}/files/{RECORD}"),
    *(f"/{RUN}/objects/%ff%fe", f"/{RUN}/objects/%00", f"/{RUN}/objects/%zz", f"/{RUN}%2f..%2f"),
    *(f"/{RUN}/objects/{RECORD}?x=1", f"/{RUN}/objects/{RECORD}#x", "/%2e%2e/%2e%2e/etc/passwd"),
    *(f"http://a/{RUN}/objects/{RECORD}", "a" * 100, "/" + "a/" * 3000, "/../../../etc/passwd"),
]


@pytest.mark.parametrize("target", ODD_TARGETS)
def test_an_odd_target_is_refused(server: PeerServer, target: str) -> None:
    answer = told(server, request(target))
    assert status_of(answer) in (400, 404)
    assert b"root:" not in answer
    assert_serves(server)


# Ranges.


@pytest.mark.parametrize(
    ("first", "last"), [(0, 0), (0, SIZE - 1), (5, 4099), (SIZE - 1, SIZE - 1)]
)
def test_a_range_is_what_was_asked_for(server: PeerServer, first: int, last: int) -> None:
    answer = told(server, request(objects(IMAGE), f"Range: bytes={first}-{last}"))
    assert status_of(answer) == 206
    assert f"Content-Range: bytes {first}-{last}/{SIZE}".encode() in answer
    assert body_of(answer) == content(SIZE, 1)[first : last + 1]


@pytest.mark.parametrize("asked", [(0, SIZE), (SIZE, SIZE), (SIZE, SIZE + 9), (5, 4), (0, 10**18)])
def test_a_range_that_is_not_in_the_object_is_refused(
    server: PeerServer, asked: tuple[int, int]
) -> None:
    answer = told(server, request(objects(IMAGE), f"Range: bytes={asked[0]}-{asked[1]}"))
    assert status_of(answer) == 416
    assert f"Content-Range: bytes */{SIZE}".encode() in answer


@pytest.mark.parametrize("header", ["bytes=-5", "bytes=5-", "bytes=0-1,3-4", "items=0-1", "x", ""])
def test_a_range_of_another_form_is_refused(server: PeerServer, header: str) -> None:
    assert status_of(told(server, request(objects(IMAGE), f"Range: {header}"))) == 400


def test_head_tells_the_size_and_sends_nothing(server: PeerServer) -> None:
    answer = told(server, request(objects(IMAGE), method="HEAD"))
    assert status_of(answer) == 200
    assert f"Content-Length: {SIZE}".encode() in answer
    assert body_of(answer) == b""
    assert status_of(told(server, request(objects("a/b"), method="HEAD"))) == 404


# What it costs.


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 100_000,
        b"\r\n" * 100_000,
    ],
    ids=["line", "header", "headers", "version", "TLS", "zeros", "lines"],
)
def test_a_head_that_is_too_long_or_none_ends_the_connection(
    server: PeerServer, head: bytes
) -> None:
    with connected(server) as made:
        # The server may end it before it has read all of that.
        with contextlib.suppress(ConnectionError):
            made.sendall(head)
        # The message names the place of the error.
        assert len(all_of(made)) < 1_000_000
    assert_serves(server)


def test_a_request_that_trickles_in_is_cut_off(server: PeerServer) -> None:
    with connected(server) as made:
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in request(objects(IMAGE)) * 100:
                made.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - started < 10 * LIMITS.idle_secs
    assert_serves(server)


def test_a_connection_that_asks_nothing_is_cut_off(server: PeerServer) -> None:
    with connected(server) as made:
        started = time.monotonic()
        assert all_of(made) == b""
        assert time.monotonic() - started < 10 * LIMITS.idle_secs
        assert time.monotonic() - started > 0.5 * LIMITS.idle_secs


def test_only_so_many_connections_are_let_in(root: Path, own: RamStore) -> None:
    with (
        serving(root, PeerLimits(connection_count_max=8)) as server,
        contextlib.ExitStack() as stack,
    ):
        silent = [stack.enter_context(connected(server)) for _ in range(40)]
        wait_until(lambda: sum(map(_has_ended, silent)) >= 32)
        (*inside,) = (connection for connection in silent if not _has_ended(connection))
        assert len(inside) == 8
        # One that ends makes room again.
        inside[0].close()
        wait_until(lambda: _is_served(server))


def _is_served(server: PeerServer) -> bool:
    with connected(server) as made, contextlib.suppress(ConnectionError):
        made.sendall(request(objects(IMAGE)))
        return made.recv(1) != b""
    return False


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_client_that_stops_reading_is_cut_off_and_its_slot_is_free(
    server: PeerServer, own: RamStore, root: Path
) -> None:
    with _small_window(server) as made:
        made.sendall(request(objects(IMAGE)))
        assert made.recv(1000)
        own.delete(IMAGE)
        pool = SlotPool(root, None, SystemClock())
        assert [*pool.free_slots()] == []
        wait_until(lambda: len(pool.free_slots()) == 1)


def _small_window(server: PeerServer) -> socket.socket:
    made = socket.socket()
    # Set before it connects, so that the sender cannot get rid of all of it at once.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(WAIT_SECS)
    made.connect((LOOPBACK, server.address.port))
    return made


def test_what_is_on_its_way_stays_as_it_is_whatever_happens_to_the_slot(
    root: Path, own: RamStore
) -> None:
    """What `sendfile` sent are the slot's own pages, also when the server has done with them."""
    size = 100_000
    key = "checkpoints/000000011.1-00000001/image-00000-of-00001.safetensors"
    own.put(key, content(size, 3))
    with serving(root, PeerLimits(idle_secs=60.0)) as server, connected(server) as made:
        made.sendall(request(objects(key)).replace(b"Connection: close\r\n", b""))
        # All of it is in the socket's buffers, and nothing of it was read.
        wait_until(lambda: _unread(made) >= size)
        own.delete(key)
        for number in range(3):
            own.put(f"{key}.{number}.safetensors", content(size, 4))
        got = b""
        while not body_of(got) or len(body_of(got)) < size:
            got += made.recv(1 << 16)
        assert body_of(got) == content(size, 3)
        pool = SlotPool(root, None, SystemClock())
        assert [*pool.free_slots()] == []
    wait_until(lambda: len(pool.free_slots()) == 1)


def _unread(connection: socket.socket) -> int:
    import fcntl
    import termios

    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]


def test_a_client_that_goes_away_midway_leaves_nothing_behind(
    server: PeerServer, own: RamStore, root: Path
) -> None:
    before = psutil.Process().num_fds()
    for _ in range(20):
        with _small_window(server) as made:
            made.sendall(request(objects(IMAGE)))
            made.recv(1000)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    own.delete(IMAGE)
    wait_until(lambda: len(SlotPool(root, None, SystemClock()).free_slots()) == 1)
    wait_until(lambda: psutil.Process().num_fds() <= before)


@pytest.mark.parametrize("seed", range(20260801, 20260801 + 5))
def test_random_bytes_are_refused_and_it_serves_on(server: PeerServer, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        data = bytearray(request(objects(RECORD)))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with connected(server) as made:
            made.sendall(bytes(data))
            made.shutdown(socket.SHUT_WR)
            answer = all_of(made)
        assert len(answer) < 10_000
    assert_serves(server)


def test_a_server_that_is_closed_while_it_sends_ends_at_once(root: Path, own: RamStore) -> None:
    with serving(root) as server, _small_window(server) as made:
        made.sendall(request(objects(IMAGE)))
        made.recv(1000)
        started = time.monotonic()
        server.close()
        assert time.monotonic() - started < 30.0
        all_of(made)


# Where it listens, and its token.


def test_it_never_listens_on_every_interface() -> None:
    for address in ("0.0.0.0", "::", "0", "", "no-such-interface", "256.0.0.1", "localhost:1"):
        with pytest.raises(InvalidArgumentError):
            listen(address, 0)


def test_it_listens_on_the_address_or_the_interface_that_is_named() -> None:
    for address in (LOOPBACK, "lo"):
        with contextlib.closing(listen(address, 0)) as made:
            assert made.getsockname()[0] == LOOPBACK
            with pytest.raises(StorageError, match="choose another"):
                listen(address, made.getsockname()[1])
    with pytest.raises(StorageError):
        listen(LOOPBACK, 70_000)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_an_address_of_ipv6_is_served(root: Path, own: RamStore) -> None:
    try:
        listener = listen("::1", 0)
    except StorageError as error:
        pytest.skip(f"no IPv6 on loopback: {error}")
    from holdfast.peers.server import ServedRun

    served = ServedRun(store=ram(root), run_id=RUN, token=TOKEN)
    with contextlib.closing(PeerServer(served, listener)) as server:
        assert str(server.address).startswith("[::1]:")
        with reaching(server.address) as peer:
            assert peer.get(RECORD) == b"record"


def test_a_token_is_read_from_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(StorageError, match=str(path)):
        read_token(str(path))
    path.touch(mode=0o600)
    for wrong in ("", "short", "x" * 31, "a b" * 20, "é" * 40, "x" * 10_000):
        path.write_text(wrong)
        with pytest.raises(InvalidArgumentError) as refused:
            read_token(str(path))
        assert not wrong or wrong not in str(refused.value)
    path.write_text(f"  {TOKEN}\n")
    assert read_token(str(path)) == TOKEN
    for mode in (0o644, 0o640, 0o604, 0o602):
        path.chmod(mode)
        with pytest.raises(StorageError, match=f"{mode:o}"):
            read_token(str(path))


def test_tokens_do_not_show_in_what_is_printed(server: PeerServer) -> None:
    assert TOKEN not in repr(server._served)
    assert str(PeerAddress("::1", 5)) == "[::1]:5"
