"""Answers whose bytes come slowly, or once with a wrong one: no checkpoint is given up for them."""

from __future__ import annotations

import http.server
import logging
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast.clock import SystemClock
from holdfast.errors import StorageError, StorageThrottledError
from holdfast.format.sealed import is_sealed, seal
from holdfast.local_agent import launch
from holdfast.store.bucket import object_service
from holdfast.store.bucket.bucket import BucketStore, Outage, Tries
from holdfast.store.bucket.object_service import connect
from holdfast.store.bucket.upload_pace import UploadPace
from tests.buckets.fault_proxy import FaultProxy, Request
from tests.buckets.object_server import ObjectServer
from tests.hosts import Host
from tests.trust.in_process import StepClock

pytest.importorskip("obstore", reason="obstore is not installed")
PIECES, PIECE_BYTES, PAUSE_SECS = 15, 1000, 0.2


class Trickling(http.server.BaseHTTPRequestHandler):
    """Answers each GET of a range in small pieces, with pauses."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        size = PIECES * PIECE_BYTES
        self.send_response(206)
        self.send_header("Content-Length", str(size))
        self.send_header("Content-Range", f"bytes 0-{size - 1}/{size}")
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        for number in range(PIECES):
            self.wfile.write(bytes([number]) * PIECE_BYTES)
            self.wfile.flush()
            time.sleep(PAUSE_SECS)


@pytest.fixture
def trickling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickling) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield
        server.shutdown()
        thread.join()


def test_an_answer_may_take_longer_than_a_request_while_its_bytes_come(
    trickling: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_service, "REQUEST_SECS", 1)
    monkeypatch.setattr(object_service, "SILENT_SECS", 1)
    target = bytearray(PIECES * PIECE_BYTES)
    began = time.monotonic()
    connect("s3://bucket").read_into("image", '"one"', 0, memoryview(target))
    assert time.monotonic() - began > 2
    assert target[::PIECE_BYTES] == bytes(range(PIECES))
    assert "has not answered" not in caplog.text


class WrongOnce(ObjectServer):
    """A service of which the first answer for each key has a wrong byte."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str, size_max_bytes: int) -> bytes:
        data = super().get(key, size_max_bytes)
        self.read.append(key)
        return data if self.read.count(key) > 1 else bytes([data[0] ^ 1]) + data[1:]


class Record(msgspec.Struct):
    format_version: int = 1


def test_a_record_that_comes_with_a_wrong_byte_is_read_again() -> None:
    server = WrongOnce()
    store = BucketStore(server, "run/", SystemClock())
    sealed = seal(Record())
    assert is_sealed(sealed)
    assert not is_sealed(sealed[:-1])
    store.put("part.json", sealed)
    store.put("other", sealed)
    assert store.get("part.json") == sealed
    assert server.read == ["run/part.json"] * 2
    # Nothing says what the bytes of other objects should be.
    assert store.get("other") != sealed


def test_each_failure_of_a_request_is_told_as_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    clock = StepClock()
    tries = Tries(clock, "s3://bucket/run", UploadPace(clock), Outage())
    with caplog.at_level(logging.WARNING):
        tries.failed(StorageThrottledError("503 SlowDown"))
        assert "too many requests" in caplog.text
        caplog.clear()
        tries.failed(StorageError("reset by peer"))
        clock.sleep(60)
        tries.failed(StorageThrottledError("503 SlowDown"))
    assert "too many requests" not in caplog.text
    assert "try 0" not in caplog.text


def test_an_opening_outlasts_refusals_that_its_agent_meets(
    proxy: FaultProxy,
    proxied_url: str,
    one_host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(launch, "START_SECS", 1.0)
    monkeypatch.setattr(launch, "LOG_SECS", 1.0)
    state = {"w": np.arange(3)}
    with holdfast.CheckpointManager(proxied_url) as manager:
        manager.save(0, state, force=True)
    one_host.kill_agents()
    until_secs = 0.0

    def choose(request: Request) -> str | None:
        nonlocal until_secs
        if not until_secs and one_host.agent_processes():
            until_secs = time.monotonic() + 4
        return "slow down" if time.monotonic() < until_secs else None

    proxy.choose = choose
    with holdfast.CheckpointManager(proxied_url) as manager:
        assert time.monotonic() > until_secs > 0
        assert manager.resume(state)[0] == 1
    assert "has not answered for 1 s: it reads the run" in caplog.text
