"""The requests of an opening by real processes, counted by a proxy before the server."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from holdfast import CheckpointManager
from holdfast.adapt.contract import OwnProcess
from holdfast.clock import SystemClock
from holdfast.errors import NotARunError
from holdfast.trainer.opening.opening import open_run
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.buckets.fault_proxy import FaultProxy, Request
from tests.buckets.test_runs import run_command
from tests.hosts import Host


def small(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(100, step, np.float32)}


def test_opening_and_resuming_takes_13_requests_and_those_of_the_image(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    with CheckpointManager(proxied_url) as manager:
        manager.resume(small(0))
        for step in range(1, 4):
            manager.save(step, small(step), force=True)
        manager.wait_until_finished()
    run_command("stop", proxied_url)
    seen: list[str] = []
    lock = threading.Lock()

    def note(request: Request) -> None:
        with lock:
            seen.append(f"{request.method} {request.path}")

    proxy.choose = note
    manager = CheckpointManager(proxied_url)
    step, found = manager.resume(small(0))
    with lock:
        opening = list(seen)
    proxy.choose = lambda request: None
    manager.close()
    assert step == 4
    assert found["w"][0] == 3
    of_image = [one for one in opening if "safetensors" in one]
    # Its properties, the header and the bytes.
    assert len(of_image) <= 3, of_image
    assert len(opening) - len(of_image) <= 13, "\n".join(opening)


def test_a_new_run_in_the_prefix_of_another_one_is_warned_of(
    proxied_url: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    rendezvous = Rendezvous(OwnProcess(), SystemClock())
    open_run(proxied_url, rendezvous, SystemClock())
    inner = f"{proxied_url}/a/b"
    open_run(inner, rendezvous, SystemClock())
    (line,) = [one.getMessage() for one in caplog.records]
    assert f"the new run {inner} is inside another run, {proxied_url}:" in line
    caplog.clear()
    proxy.requests.clear()
    open_run(inner, rendezvous, SystemClock())
    assert not caplog.records
    # A run that is there costs no look at the prefixes above it.
    assert all("/a/b/" in one.path for one in proxy.requests)
    with pytest.raises(NotARunError, match="expected a run or an empty prefix"):
        open_run(proxied_url.rpartition("/")[0], rendezvous, SystemClock())
