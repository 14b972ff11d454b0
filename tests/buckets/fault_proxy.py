"""A proxy before an S3 server that makes its requests fail, as networks and services do.

Which request fails, and how, is drawn from a seed for each request in turn.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

ERRORS = {
    "slow down": (503, "SlowDown"),
    "too many": (429, "TooManyRequests"),
    "conflict": (409, "ConditionalRequestConflict"),
    "internal": (500, "InternalError"),
}
"""Answers instead of the server's; the request has no effect."""
REFUSALS = {
    "expired": (400, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "refused": (403, "AccessDenied"),
    "wrong region": (400, "AuthorizationHeaderMalformed"),
}
"""Answers of a service that repeating the request does not change."""
FAULTS = (*ERRORS, "reset before", "reset after", "cut off")
"""Faults of which a client can know that the request failed, or that it may have."""
PASSED = ("Content-Type", "ETag", "Last-Modified", "Content-Range", "Content-Length")
SILENT_SECS = 120.0


class Request(NamedTuple):
    """What a fault may be chosen by."""

    method: str
    path: str


class FaultProxy(http.server.ThreadingHTTPServer):
    """Attributes:
    choose: the fault of a request; None where it is passed on as it is.
    on_answer: called with each request that the server has answered, before the client gets that.
    counts: the requests by method, and the faults by name.
    rate: bytes a second of answers and requests; None where nothing is slowed.
    requests: all requests.
    read: the path and the size of each answer to a GET of the server's.
    written: the same of each request with a body.
    signed: the path of each request with a body, and the digest of that in its signature.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = port
        self.choose: Callable[[Request], str | None] = lambda request: None
        self.on_answer: Callable[[Request], None] = lambda request: None
        self.counts: Counter[str] = Counter()
        self.rate: float | None = None
        self.requests: list[Request] = []
        self.read: list[tuple[str, int]] = []
        self.written: list[tuple[str, int]] = []
        self.signed: list[tuple[str, str]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients and servers end connections here on purpose."""


def seeded(seed: int, share: float, faults: Sequence[str] = FAULTS) -> Callable[[Request], str]:
    """Faults of that share of requests, from a seed."""
    random_of, lock = random.Random(seed), threading.Lock()

    def choose(request: Request) -> str | None:
        with lock:
            return random_of.choice(faults) if random_of.random() < share else None

    return choose  # type: ignore[return-value]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server: FaultProxy

    def log_message(self, *args: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        return True

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._pause(len(body))
        request = Request(self.command, self.path)
        fault = self.server.choose(request)
        self.server.counts[self.command] += 1
        self.server.requests.append(request)
        if fault is not None:
            self.server.counts[fault] += 1
        if fault in ERRORS or fault in REFUSALS:
            status, code = (ERRORS | REFUSALS)[fault]
            text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self._answer(status, {"Content-Length": str(len(text))}, text)
        elif fault == "reset before":
            self._reset()
        elif fault == "silent":
            # The client gives up first.
            self.connection.settimeout(SILENT_SECS)
            self.connection.recv(1)
            self.close_connection = True
        else:
            self._pass_on(request, body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _pass_on(self, request: Request, body: bytes, fault: str | None) -> None:
        server = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            # The Host header is signed, and so is passed on as the client has sent it.
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    server.putheader(name, value)
            server.endheaders(body)
            answer = server.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            # The server is down.
            self._reset()
            return
        finally:
            server.close()
        self.server.on_answer(request)
        self._pause(len(data))
        if self.command == "GET":
            self.server.read.append((self.path, len(data)))
        elif body:
            self.server.written.append((self.path, len(body)))
            self.server.signed.append((self.path, self.headers.get("x-amz-content-sha256", "")))
        if fault == "reset after":
            self._reset()
            return
        if fault == "wrong byte" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        headers = {name: answer.getheader(name) for name in PASSED if answer.getheader(name)}
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(data))
        if fault == "cut off" and data:
            self._answer(answer.status, headers, data[: len(data) // 2])
            self.wfile.flush()
            self._reset()
            return
        self._answer(answer.status, headers, data)

    def _answer(self, status: int, headers: dict[str, str | None], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value or "")
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        """Ends the connection without an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _pause(self, size_bytes: int) -> None:
        if self.server.rate is not None:
            time.sleep(size_bytes / self.server.rate)


@contextlib.contextmanager
def running_proxy(port: int) -> Iterator[FaultProxy]:
    """A proxy before the server at that port."""
    with FaultProxy(port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, name="fault-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
