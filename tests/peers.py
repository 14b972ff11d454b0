"""Peers on loopback: real servers, one that answers from a script, and a line that misbehaves."""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError
from holdfast.format.digests import Buffer
from holdfast.peers.address import PeerAddress
from holdfast.peers.client import PeerAccess
from holdfast.peers.config import LOOPBACK, listen
from holdfast.peers.connection import PeerBounds
from holdfast.peers.server import PeerServer, ServedRun
from holdfast.peers.server_connections import PeerLimits
from holdfast.peers.store import PeerStore
from holdfast.peers.tls import PeerTls, server_context
from holdfast.store.contract import Reader, Source, Store, StoredObject
from tests.engine.stores import ram

RUN = "0123456789abcdef0123456789abcdef"
TOKEN = "5f2b8c1e9d3a47f0a6b1c2d3e4f50617"
WAIT_SECS = 240.0
# Short, so that what fails fails soon; of what has to be right, none comes near them.
QUICK = PeerBounds(connect_secs=2.0, stall_secs=1.0, rest_secs=60.0)
PATIENT = PeerBounds(rest_secs=0.0)


@contextlib.contextmanager
def serving(
    root: Path, limits: PeerLimits | None = None, tls: PeerTls | None = None
) -> Iterator[PeerServer]:
    """A server of the RAM tier in `root`."""
    context = server_context(tls) if tls is not None else None
    served = ServedRun(store=ram(root), run_id=RUN, token=TOKEN, tls=context)
    server = PeerServer(served, listen(LOOPBACK, 0), limits)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def reaching(
    address: PeerAddress,
    bounds: PeerBounds = QUICK,
    *,
    run: str = RUN,
    token: str = TOKEN,
    tls: PeerTls | None = None,
) -> Iterator[PeerStore]:
    """A store of what is served there."""
    access = PeerAccess(address=address, run_id=run, token=token, tls=tls)
    with contextlib.closing(PeerStore(access, SystemClock(), bounds)) as store:
        yield store


class ReadThroughPeer(Store):
    """A RAM tier that is written to as such, and read through a peer's server of it."""

    tier = name = "peer"
    is_in_memory = is_optional = True

    def __init__(self, own: Store, peer: PeerStore) -> None:
        self._own = own
        self._peer = peer
        self.link = own.link

    def put(self, key: str, source: Source | Buffer) -> None:
        self._own.put(key, source)

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        return self._own.put_if_absent(key, data, after)

    def list_some(
        self, prefix: str, *, after: str = "", before: str = "", count_max: int | None = None
    ) -> builtins.list[StoredObject]:
        return self._own.list_some(prefix, after=after, before=before, count_max=count_max)

    def delete(self, *keys: str) -> None:
        self._own.delete(*keys)

    def discard_unfinished(self, prefix: str) -> None:
        self._own.discard_unfinished(prefix)

    def get(self, key: str) -> bytes:
        return self._peer.get(key)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        return self._peer.get_many(keys)

    def open(self, key: str) -> contextlib.AbstractContextManager[Reader]:
        return self._peer.open(key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._peer.list(prefix)


@dataclass
class PeerOpener:
    """Opens such stores, in whichever process; `close` closes those of this one."""

    root: Path
    port: int
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __call__(self) -> Store:
        own = ram(self.root)
        self.opened.callback(own.close)
        peer = self.opened.enter_context(reaching(PeerAddress(LOOPBACK, self.port), PATIENT))
        return ReadThroughPeer(own, peer)

    def __getstate__(self) -> tuple[Path, int]:
        return self.root, self.port

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]


@contextlib.contextmanager
def serving_process(root: Path) -> Iterator[tuple[BaseProcess, PeerAddress]]:
    """A server in a process of its own, to be stopped or killed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(root, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(WAIT_SECS), "the process that serves said nothing"
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def _serve(root: Path, pipe: Connection) -> None:
    with serving(root) as server:
        pipe.send(server.address)
        # Nobody answers: the process is killed here.
        pipe.recv()


class Listener:
    """A thread a connection, on a port of loopback; `attend` gets each, which is closed after."""

    def __init__(self, attend: Callable[[socket.socket], None]) -> None:
        self._attend = attend
        self._socket = socket.create_server((LOOPBACK, 0))
        self._socket.settimeout(0.05)
        self.address = PeerAddress(LOOPBACK, self._socket.getsockname()[1])
        self.ending = threading.Event()
        self.count = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self.ending.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._socket.accept()
                connection.settimeout(WAIT_SECS)
                self.count += 1
                self._threads.append(threading.Thread(target=self._one, args=(connection,)))
                self._threads[-1].start()

    def _one(self, connection: socket.socket) -> None:
        # Whoever asks may go away at any point.
        with connection, contextlib.suppress(OSError):
            self._attend(connection)

    def close(self) -> None:
        self.ending.set()
        for thread in self._threads:
            thread.join(WAIT_SECS)
            assert not thread.is_alive()
        self._socket.close()


@contextlib.contextmanager
def listening(attend: Callable[[socket.socket], None]) -> Iterator[Listener]:
    with contextlib.closing(Listener(attend)) as made:
        yield made


def request_on(connection: socket.socket) -> str:
    """The head of the next request; empty where there is none."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = connection.recv(1)
        if not data:
            return ""
        head += data
    return head.decode("latin-1")


@contextlib.contextmanager
def scripted(*answers: bytes) -> Iterator[Listener]:
    """A peer that gives these answers in turn, over all connections, and then ends each."""
    left = iter(answers)

    def attend(connection: socket.socket) -> None:
        while request_on(connection) and (answer := next(left, None)) is not None:
            connection.sendall(answer)

    with listening(attend) as made:
        yield made


@dataclass
class Line:
    """Between a client and a peer. What it does to the bytes that come back may be changed."""

    target: PeerAddress
    rate_bytes: float = float("inf")
    is_cut: threading.Event = field(default_factory=threading.Event)
    passed_bytes: int = 0
    cut_after_bytes: float = float("inf")
    spoil: Callable[[bytes, int], bytes] = lambda data, passed: data

    def attend(self, connection: socket.socket) -> None:
        with socket.create_connection((self.target.host, self.target.port)) as beyond:
            both = [connection, beyond]
            while True:
                ready, _, _ = select.select(both, [], [], 0.05)
                if self.is_cut.is_set():
                    # Neither end hears anything more, as of a cable that was pulled.
                    if _is_closed(connection):
                        return
                    continue
                for one in ready:
                    data = one.recv(64 * 1024)
                    if not data:
                        return
                    if one is connection:
                        beyond.sendall(data)
                    else:
                        self._pass_back(connection, data)

    def _pass_back(self, connection: socket.socket, data: bytes) -> None:
        data = self.spoil(data, self.passed_bytes)
        self.passed_bytes += len(data)
        connection.sendall(data)
        time.sleep(len(data) / self.rate_bytes)
        if self.passed_bytes > self.cut_after_bytes:
            self.is_cut.set()


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it, also where a last request of it was never read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(20))


@contextlib.contextmanager
def line_to(target: PeerAddress, **traits: object) -> Iterator[tuple[Line, PeerAddress]]:
    """A line, and the address at this end of it."""
    line = Line(target, **traits)  # type: ignore[arg-type]
    with listening(line.attend) as made:
        yield line, made.address


@dataclass(frozen=True)
class Authority:
    """Makes certificates with the `openssl` command."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self._run("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", *_SUBJECT)

    def issue(self, name: str, alternative: str = "IP:127.0.0.1") -> PeerTls:
        """A certificate, with its key and this authority."""
        self._run("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", *_SUBJECT)
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={alternative}\n")
        self._run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
        return PeerTls(
            certificate=str(self.folder / f"{name}.pem"),
            key=str(self.folder / f"{name}.key"),
            authority=str(self.folder / "ca.pem"),
        )

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=self.folder, capture_output=True, check=True, timeout=240
        )


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_SUBJECT = ("-subj", "/CN=holdfast-test")
