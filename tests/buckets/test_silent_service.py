"""A service that accepts connections and never answers: signals take effect, and a line says so."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import WaitInterruptedError
from tests.buckets.fault_proxy import FaultProxy
from tests.hosts import Host

pytest.importorskip("obstore", reason="obstore is not installed")
URL = "s3://bucket/run"
EFFECT_SECS = 10.0


@pytest.fixture
def service() -> Iterator[dict[str, str]]:
    """The environment that names a silent service."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:

        def accept() -> None:
            while True:
                try:
                    accepted.append(listening.accept()[0])
                except OSError:
                    return

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listening.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        listening.shutdown(socket.SHUT_RDWR)
    accepting.join()
    for connection in accepted:
        connection.close()


def interrupted(
    call: Callable[[], object],
    is_silent: Callable[[], bool],
    number: signal.Signals = signal.SIGINT,
    error: type[BaseException] = KeyboardInterrupt,
) -> float:
    """Send a signal once the service is silent; return after how many seconds the call ended.

    Another thread receives it, which interrupts no system call of the main one.
    """
    pressed_at: list[float] = []

    def press() -> None:
        while not is_silent():
            time.sleep(0.01)
        pressed_at.append(time.monotonic())
        signal.pthread_kill(threading.get_ident(), number)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(error):
        call()
    ended = time.monotonic()
    pressing.join()
    return ended - pressed_at[0]


@pytest.mark.parametrize("is_remote", [False, True], ids=["bucket", "remote tier"])
def test_an_opening_beside_a_silent_service_says_so_and_ends_at_ctrl_c(
    one_host: Host,
    service: dict[str, str],
    is_remote: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    for name, value in service.items():
        monkeypatch.setenv(name, value)
    place, remote = (tmp_path / "run", URL) if is_remote else (URL, None)
    before = time.monotonic()
    secs = interrupted(lambda: CheckpointManager(place, remote=remote), lambda: bool(caplog.text))
    assert secs < EFFECT_SECS
    assert time.monotonic() - before > 5.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert "in s3://bucket: the service has not answered for 5 s" in line


@pytest.mark.parametrize("command", [["ls", URL], ["copy", URL, "target"]], ids=lambda c: c[0])
def test_a_command_beside_a_silent_service_ends_at_ctrl_c(
    one_host: Host, service: dict[str, str], command: list[str], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast", *command],
        env=one_host.environment | service,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        assert "the service has not answered for 5 s" in running.stderr.readline()
        pressed = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert running.wait(240) == 128 + signal.SIGINT
        assert time.monotonic() - pressed < EFFECT_SECS
        assert running.stderr.read().strip() == "interrupted"


def test_a_restore_from_a_service_that_falls_silent_ends_at_ctrl_c(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    state = {str(number): np.full(1000, number) for number in range(4)}
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.save(0, state, force=True)
    images = lambda request: "silent" if "image-" in request.path else None  # noqa: E731
    with holdfast.open_run(proxied_url) as run:
        proxy.choose = images
        assert interrupted(run.restore, lambda: proxy.counts["silent"] > 0) < EFFECT_SECS


@pytest.mark.parametrize("count", [1, 4], ids=["one reader", "a pool of readers"])
def test_a_restore_from_a_service_that_falls_silent_ends_at_a_preemption_signal(
    one_host: Host, proxy: FaultProxy, proxied_url: str, count: int
) -> None:
    state = {str(number): np.full(1000, number) for number in range(count)}
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.save(0, state, force=True)
        manager.wait_until_finished()
        proxy.choose = lambda request: "silent" if "image-" in request.path else None
        secs = interrupted(
            lambda: manager.restore(like=state),
            lambda: proxy.counts["silent"] > 0,
            signal.SIGTERM,
            WaitInterruptedError,
        )
        proxy.choose = lambda request: None
    assert secs < EFFECT_SECS
