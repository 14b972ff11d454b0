"""Mutual TLS between agents: both ends are checked, and what it refuses learns nothing."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.fetch import fetch_part
from holdfast.errors import StorageError
from holdfast.format.names import CHECKPOINTS
from holdfast.peers.config import LOOPBACK
from holdfast.peers.server import PeerServer
from holdfast.peers.server_connections import PeerLimits
from holdfast.peers.tls import PeerTls, client_context, server_context
from holdfast.store.ram import RamStore
from holdfast.store.slots import SlotPool
from tests.engine.making import Made, memory_folder, random_array
from tests.engine.stores import ram
from tests.hosts import wait_until
from tests.peers import TOKEN, Authority, listening, reaching, serving

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the openssl command makes the certificates"
)
LIMITS = PeerLimits(connection_count_max=4, idle_secs=1.0, piece_secs=1.0, handshake_secs=1.0)
KEY = f"{CHECKPOINTS}/a"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "own")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "other")


@pytest.fixture(scope="module")
def tls(authority: Authority) -> PeerTls:
    return authority.issue("agent")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield Path(folder)


@pytest.fixture
def own(root: Path) -> Iterator[RamStore]:
    with contextlib.closing(ram(root / "theirs")) as store:
        store.put(KEY, b"hello")
        yield store


@pytest.fixture
def server(own: RamStore, tls: PeerTls) -> Iterator[PeerServer]:
    with serving(own.root, LIMITS, tls) as made:
        yield made


def assert_serves(server: PeerServer, tls: PeerTls) -> None:
    with reaching(server.address, tls=tls) as peer:
        assert peer.get(KEY) == b"hello"


def test_a_part_is_pulled_over_tls(
    server: PeerServer, authority: Authority, own: RamStore, root: Path
) -> None:
    made = Made()
    made.add(("w",), random_array((40 << 20,), "uint8", 1))
    (part,) = made.write(own)
    with (
        contextlib.closing(ram(root / "own")) as mine,
        reaching(server.address, tls=authority.issue("another-agent")) as peer,
    ):
        fetch_part(peer, mine, part, PartLayouts(made.spec.arrays))
        for stored in own.list(f"{CHECKPOINTS}/{made.id}"):
            assert mine.get(stored.key) == own.get(stored.key)


def test_a_plain_client_is_refused(server: PeerServer, tls: PeerTls) -> None:
    with reaching(server.address) as peer, pytest.raises(StorageError, match=str(server.address)):
        peer.get(KEY)
    assert_serves(server, tls)


def test_a_plain_server_is_refused_and_not_told_the_token(own: RamStore, tls: PeerTls) -> None:
    with (
        serving(own.root) as plain,
        reaching(plain.address, tls=tls) as peer,
        pytest.raises(StorageError),
    ):
        peer.get(KEY)
    heard = bytearray()

    def listen_closely(connection: socket.socket) -> None:
        while data := connection.recv(1 << 16):
            heard.extend(data)

    with (
        listening(listen_closely) as made,
        reaching(made.address, tls=tls) as peer,
        pytest.raises(StorageError),
    ):
        peer.get(KEY)
    assert heard
    assert TOKEN.encode() not in heard


def test_a_client_of_another_authority_is_refused(
    server: PeerServer, tls: PeerTls, other: Authority
) -> None:
    # It trusts the server, and shows what the server does not trust.
    stranger = replace(other.issue("stranger"), authority=tls.authority)
    with reaching(server.address, tls=stranger) as peer, pytest.raises(StorageError):
        peer.get(KEY)
    assert_serves(server, tls)


def test_a_client_without_a_certificate_is_refused(server: PeerServer, tls: PeerTls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.authority)
    with socket.create_connection((LOOPBACK, server.address.port), timeout=20) as raw:
        said = b""
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(raw, server_hostname=LOOPBACK) as made,
        ):
            # With TLS 1.3 a client hears of it when it first reads.
            made.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            said = made.recv(1000)
    assert said == b""
    assert_serves(server, tls)


def test_a_server_of_another_authority_is_refused_and_not_told_the_token(
    tls: PeerTls, other: Authority
) -> None:
    # What it would take to hear the client: it asks for no certificate.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    imposter = other.issue("imposter")
    context.load_cert_chain(imposter.certificate, imposter.key)
    heard = bytearray()

    def pretend(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as made:
            heard.extend(made.recv(1 << 16))

    with (
        listening(pretend) as made,
        reaching(made.address, tls=tls) as peer,
        pytest.raises(StorageError, match="certificate verify failed"),
    ):
        peer.get(KEY)
    assert heard == b""


def test_a_server_whose_certificate_names_another_address_is_refused(
    own: RamStore, authority: Authority, tls: PeerTls
) -> None:
    elsewhere = authority.issue("elsewhere", "IP:192.0.2.1,DNS:elsewhere.invalid")
    with (
        serving(own.root, LIMITS, elsewhere) as made,
        reaching(made.address, tls=tls) as peer,
        pytest.raises(StorageError, match=r"certificate is not valid for '127\.0\.0\.1'"),
    ):
        peer.get(KEY)


def test_the_token_is_asked_for_under_tls_too(server: PeerServer, tls: PeerTls) -> None:
    with (
        reaching(server.address, tls=tls, token="0" * 32) as peer,
        pytest.raises(StorageError, match="401"),
    ):
        peer.get(KEY)


def test_an_older_tls_is_refused(server: PeerServer, tls: PeerTls) -> None:
    context = client_context(tls)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    raw = socket.create_connection((LOOPBACK, server.address.port), timeout=20)
    with raw, pytest.raises(OSError, match=r"(?i)protocol|version"):
        context.wrap_socket(raw, server_hostname=LOOPBACK)


def test_a_handshake_that_does_not_come_is_cut_off(server: PeerServer, tls: PeerTls) -> None:
    made = [socket.create_connection((LOOPBACK, server.address.port), timeout=20) for _ in range(9)]
    started = time.monotonic()
    for one in made:
        with one, contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""
    assert time.monotonic() - started < 15.0
    assert_serves(server, tls)


def test_a_client_that_stops_reading_is_cut_off_and_its_slot_is_free(
    server: PeerServer, tls: PeerTls, own: RamStore
) -> None:
    key = f"{CHECKPOINTS}/b.safetensors"
    own.put(key, bytes(16 << 20))
    raw = socket.create_connection((LOOPBACK, server.address.port), timeout=20)
    with client_context(tls).wrap_socket(raw, server_hostname=LOOPBACK) as made:
        target = f"GET /{server._served.run_id}/objects/{key} HTTP/1.1\r\nHost: a\r\n"
        made.sendall(f"{target}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert made.recv(100)
        own.delete(key)
        pool = SlotPool(own.root, None, SystemClock())
        assert [*pool.free_slots()] == []
        wait_until(lambda: len(pool.free_slots()) == 1)


def _missing(tls: PeerTls, folder: Path) -> PeerTls:
    return replace(tls, certificate=str(folder / "none.pem"))


def _no_pem(tls: PeerTls, folder: Path) -> PeerTls:
    (folder / "no.pem").write_text("no certificate")
    return replace(tls, authority=str(folder / "no.pem"))


def _anothers_key(tls: PeerTls, folder: Path) -> PeerTls:
    return replace(tls, key=Authority(folder / "ca").issue("x").key)


@pytest.mark.parametrize("spoil", [_missing, _no_pem, _anothers_key])
@pytest.mark.parametrize("context", [server_context, client_context])
def test_files_that_do_not_go_together_are_told(
    tls: PeerTls,
    tmp_path: Path,
    spoil: Callable[[PeerTls, Path], PeerTls],
    context: Callable[[PeerTls], ssl.SSLContext],
) -> None:
    with pytest.raises(StorageError, match=r"use TLS between peers: .*expected"):
        context(spoil(tls, tmp_path))
