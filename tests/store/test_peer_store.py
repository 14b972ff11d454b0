"""A peer's RAM over HTTP: the contract's reading half, and what a peer may get wrong."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, StorageError
from holdfast.peers.address import PeerAddress
from holdfast.peers.client import PeerAccess
from holdfast.peers.config import LOOPBACK
from holdfast.peers.connection import PeerBounds
from holdfast.peers.server_connections import PeerLimits
from holdfast.peers.store import PeerStore
from holdfast.store.contract import Store
from holdfast.testing.store_bytes import content, read_all
from holdfast.testing.store_suite import StoreSuite
from tests.engine.stores import ram
from tests.peers import (
    PATIENT,
    RUN,
    TOKEN,
    PeerOpener,
    listening,
    reaching,
    request_on,
    scripted,
    serving,
)

SIZE = 3 << 20
KEY = "checkpoints/000000010.1-00000001/image-00000-of-00001.safetensors"


class TestPeerRecords(StoreSuite):
    """What is put into a RAM tier is read through a server of it."""

    walk_steps = 30

    @pytest.fixture
    def opener(self, in_memory: Path) -> Iterator[Callable[[], Store]]:
        with serving(in_memory / "ram") as server:
            made = PeerOpener(in_memory / "ram", server.address.port)
            with made.opened:
                yield made


class TestPeerImages(TestPeerRecords):
    key_suffix = ".safetensors"


@pytest.fixture
def data() -> bytes:
    return content(SIZE, 7)


@pytest.fixture
def served(in_memory: Path, data: bytes) -> Iterator[PeerAddress]:
    """Where an image is served."""
    with contextlib.closing(ram(in_memory / "ram")) as own:
        own.put(KEY, data)
        with serving(in_memory / "ram") as server:
            yield server.address


def test_a_token_that_cannot_be_one_is_refused_and_not_shown() -> None:
    for token in ("", "short", "x" * 31, "with a space" * 4, "line\r\nbreak: x" * 4):
        access = PeerAccess(address=PeerAddress(LOOPBACK, 1), run_id=RUN, token=token)
        with pytest.raises(InvalidArgumentError) as raised:
            PeerStore(access, None)  # type: ignore[arg-type]
        assert not token or token not in str(raised.value)
        assert TOKEN not in repr(PeerAccess(address=PeerAddress("h", 1), run_id=RUN, token=TOKEN))


def test_readers_of_many_threads_have_connections_of_their_own(
    served: PeerAddress, data: bytes
) -> None:
    barrier = threading.Barrier(6, timeout=240)

    def read(number: int) -> bool:
        start = number * (SIZE // 6)
        target = bytearray(SIZE // 6)
        barrier.wait()
        image.read_into(start, memoryview(target))
        return target == data[start : start + len(target)]

    with reaching(served) as peer, peer.open(KEY) as image, ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(6)))


def test_a_connection_that_the_peer_closed_meanwhile_is_made_anew(
    in_memory: Path, data: bytes
) -> None:
    with contextlib.closing(ram(in_memory)) as own:
        own.put(KEY, data)
        limits = PeerLimits(idle_secs=0.1)
        with (
            serving(in_memory, limits) as server,
            reaching(server.address) as peer,
            peer.open(KEY) as image,
        ):
            for start in (0, 1000):
                time.sleep(0.5)
                target = bytearray(1000)
                image.read_into(start, memoryview(target))
                assert target == data[start : start + 1000]


def test_another_object_under_the_key_is_never_given_for_the_one_that_was_opened(
    in_memory: Path, data: bytes
) -> None:
    with contextlib.closing(ram(in_memory)) as own:
        own.put(KEY, data)
        limits = PeerLimits(idle_secs=0.1)
        with (
            serving(in_memory, limits) as server,
            reaching(server.address) as peer,
            peer.open(KEY) as image,
        ):
            # What the connection kept open ends with it; what comes is in another slot.
            own.put(KEY, content(SIZE, 8))
            time.sleep(0.5)
            with pytest.raises(StorageError, match="another object has this key"):
                image.read_into(0, memoryview(bytearray(1000)))
            assert peer.get(KEY) == content(SIZE, 8)


# A peer that answers nonsense.

ENTITY = b'ETag: "1-a"\r\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n" + ENTITY + b"\r\n"


def _partial(content_range: str, body: bytes, length: int | None = None, more: str = "") -> bytes:
    return (
        f"HTTP/1.1 206 Partial Content\r\nContent-Range: {content_range}\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n{more}\r\n"
    ).encode() + body


BAD_RANGES = {
    "another range": _partial("bytes 1-10/10", bytes(10)),
    "a shorter range": _partial("bytes 0-8/10", bytes(9)),
    "a longer range": _partial("bytes 0-10/11", bytes(11)),
    "another size of the object": _partial("bytes 0-9/11", bytes(10)),
    "no range": b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\n\r\n" + bytes(10),
    "the whole": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + bytes(10),
    "another length": _partial("bytes 0-9/10", bytes(10), 9),
    "a negative length": _partial("bytes 0-9/10", bytes(10), -1),
    "chunks": _partial("bytes 0-9/10", b"", 10, "Transfer-Encoding: chunked\r\n")
    + b"a\r\n0123456789\r\n0\r\n\r\n",
    "a body that is cut off": _partial("bytes 0-9/10", bytes(9), 10),
    "no body": _partial("bytes 0-9/10", b"", 10),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "nothing": b"",
    "an endless line": b"HTTP/1.1 206 " + b"x" * 200_000 + b"\r\n\r\n",
    "endless headers": b"HTTP/1.1 206 Partial\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    "a redirection": b"HTTP/1.1 302 Found\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n",
    "an error that is none": b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\n\xff\xfe{[",
    "an error without an end": b"HTTP/1.1 500 No\r\nContent-Length: 9000000000\r\n\r\n",
}


@pytest.mark.parametrize("answer", BAD_RANGES.values(), ids=BAD_RANGES)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(answer: bytes) -> None:
    with (
        scripted(HEAD, answer) as made,
        reaching(made.address) as peer,
        peer.open("a/b") as image,
        pytest.raises(StorageError, match=rf"{made.address}.*\[0, 10\)"),
    ):
        image.read_into(0, memoryview(bytearray(10)))


def test_the_right_answer_from_the_same_script_is_read() -> None:
    answer = _partial("bytes 0-9/10", b"0123456789")
    with scripted(HEAD, answer) as made, reaching(made.address) as peer, peer.open("a/b") as image:
        target = bytearray(10)
        image.read_into(0, memoryview(target))
        assert target == b"0123456789"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n" + ENTITY + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n" + ENTITY + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n" + ENTITY + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
    ],
)
def test_an_object_without_size_or_tag_is_not_opened(head: bytes) -> None:
    with (
        scripted(head) as made,
        reaching(made.address) as peer,
        pytest.raises(StorageError),
        peer.open("a/b"),
    ):
        pass


def _names(*objects: object) -> bytes:
    body = json.dumps({"objects": objects}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        _names(["a/../../etc/passwd", 1]),
        _names(["a/.hidden", 1]),
        _names(["/a/b", 1]),
        _names(["b/c", 1]),
        _names(["a", 1]),
        _names(["a/b", -1]),
        _names(["a/b", "1"]),
        _names(["a/c", 1], ["a/b", 1]),
        _names(["a/b", 1], ["a/b", 2]),
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[[[",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_names_that_cannot_be_are_refused(answer: bytes) -> None:
    with (
        scripted(answer) as made,
        reaching(made.address) as peer,
        pytest.raises(StorageError, match=r"names|body"),
    ):
        list(peer.list("a"))


@pytest.mark.parametrize("size", [(1 << 30) + 1, 9_000_000_000_000])
def test_what_is_too_large_is_refused_before_it_comes(size: int) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    for ask in (lambda peer: peer.get("a/b"), lambda peer: list(peer.list("a"))):
        with (
            scripted(answer) as made,
            reaching(made.address) as peer,
            pytest.raises(StorageError, match="expected a body of at most"),
        ):
            ask(peer)


def test_a_record_of_a_size_that_is_a_lie_takes_no_memory_for_it() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\nabc"
    with scripted(answer) as made, reaching(made.address) as peer:
        tracemalloc.start()
        try:
            with pytest.raises(StorageError):
                peer.get("a/b")
            assert tracemalloc.get_traced_memory()[1] < 50 << 20
        finally:
            tracemalloc.stop()


# How long it may take.


def test_a_peer_that_is_not_there_costs_one_wait_and_then_none(in_memory: Path) -> None:
    with serving(in_memory) as server:
        address = server.address
    with reaching(address) as peer:
        with pytest.raises(StorageError, match=f"peer {address}"):
            peer.get("a/b")
        for _ in range(100):
            with pytest.raises(StorageError, match=r"no request for .* because it failed"):
                peer.get("a/b")


def test_a_peer_that_says_nothing_is_given_up_by_all_threads_at_once() -> None:
    bounds = PeerBounds(stall_secs=4.0)
    with listening(_say_nothing) as made, reaching(made.address, bounds) as peer:
        started = time.monotonic()

        def ask(number: int) -> None:
            # The last one's own bound would end 3.5 s after the first one's.
            time.sleep(0.5 * number)
            with pytest.raises(StorageError):
                peer.get(f"a/{number}")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        assert made.count > 4
        assert time.monotonic() - started < bounds.stall_secs + 3.0


def _say_nothing(connection: object) -> None:
    request_on(connection)  # type: ignore[arg-type]
    request_on(connection)  # type: ignore[arg-type]


@pytest.mark.parametrize("begin", [b"", HEAD[:-2], _partial("bytes 0-9/10", b"", 1000)])
def test_a_peer_that_trickles_is_given_up(begin: bytes) -> None:
    """Each byte arrives long before the idle timeout; the whole object never does."""

    def trickle(connection) -> None:
        while request_on(connection):
            connection.sendall(begin)
            while not made.ending.wait(0.1):
                connection.sendall(b"1")

    bounds = PeerBounds(stall_secs=1.0, rate_min_bytes=1 << 30)
    with listening(trickle) as made, reaching(made.address, bounds) as peer:
        started = time.monotonic()
        with pytest.raises(StorageError):
            peer.get("a/b")
        assert time.monotonic() - started < 20.0


def test_a_peer_that_came_back_is_asked_again_after_its_rest(in_memory: Path) -> None:
    bounds = PeerBounds(stall_secs=1.0, rest_secs=0.5)
    is_dead = threading.Event()
    is_dead.set()

    def attend(connection) -> None:
        while request_on(connection) and not is_dead.is_set():
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    with listening(attend) as made, reaching(made.address, bounds) as peer:
        with pytest.raises(StorageError):
            peer.get("a/b")
        is_dead.clear()
        with pytest.raises(StorageError, match="no request for"):
            peer.get("a/b")
        time.sleep(0.6)
        assert peer.get("a/b") == b"hello"


def test_a_missing_object_lets_no_peer_rest(served: PeerAddress, data: bytes) -> None:
    with reaching(served) as peer:
        for _ in range(3):
            with pytest.raises(ObjectNotFoundError, match=f"peer {served}.*a/b"):
                peer.get("a/b")
        assert read_all(peer, KEY) == data


def test_a_range_past_the_end_is_not_even_asked_for(served: PeerAddress) -> None:
    with reaching(served, PATIENT) as peer, peer.open(KEY) as image:
        with pytest.raises(StorageError, match=f"ends at {SIZE}"):
            image.read_into(SIZE - 1, memoryview(bytearray(2)))
        image.read_into(SIZE, memoryview(bytearray(0)))


SEED = 20260801


@pytest.mark.parametrize("seed", range(SEED, SEED + 60))
def test_a_damaged_answer_is_an_error_or_what_was_asked_for(seed: int) -> None:
    """What is damaged is the frame of the answer; the bytes in it have digests."""
    chance = random.Random(seed)
    answer = bytearray(_partial("bytes 0-9/10", b"0123456789"))
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(answer) - 10)
        match chance.choice(["byte", "cut", "double"]):
            case "byte":
                answer[place] = chance.randrange(256)
            case "cut":
                del answer[place : place + chance.randint(1, 20)]
            case "double":
                answer[place:place] = answer[place : place + chance.randint(1, 20)]
    with (
        scripted(HEAD, bytes(answer)) as made,
        reaching(made.address) as peer,
        peer.open("a/b") as image,
        contextlib.suppress(StorageError),
    ):
        image.read_into(0, memoryview(bytearray(10)))
