"""Runs with their directory on a disk and a remote tier in a bucket, whose service fails."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast import CheckpointManager, RemoteTier
from holdfast.adapt.contract import OwnProcess
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.errors import StorageError, WaitTimeoutError
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from holdfast.store.location import open_durable
from holdfast.trainer.opening.opening import open_run
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.buckets.fault_proxy import FaultProxy, Request, running_proxy
from tests.buckets.s3_server import BUCKET, running_server
from tests.buckets.test_runs import check, state_of
from tests.hosts import Host, is_running, wait_until


def manager_of(fast: Path, url: str) -> CheckpointManager:
    """A manager whose remote tier gets every checkpoint."""
    return CheckpointManager(
        fast,
        save_decision_policy=FixedIntervalPolicy(1),
        remote=RemoteTier(url, save_decision_policy=FixedIntervalPolicy(1)),
    )


def committed_in(url: str) -> list[int]:
    listed = list_checkpoints(open_durable(url, SystemClock()))
    return [c.step for c, listing in listed.items() if listing.is_committed]


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, state_of(step), force=True)
    manager.wait_until_finished(30)


def check_remote(url: str, *, at_least: int) -> None:
    """Each checkpoint there is whole, and there is one of that step or a later one."""
    assert main(["verify", url]) == 0
    with holdfast.open_run(url) as run:
        steps = run.all_steps()
        assert steps[-1] >= at_least
        for step in steps:
            check(run.restore(step), step)


def test_the_end_of_a_training_does_not_wait_for_a_bucket_that_does_not_answer(
    one_host: Host, proxy: FaultProxy, proxied_url: str, tmp_path: Path
) -> None:
    fast = tmp_path / "fast"
    manager = manager_of(fast, proxied_url)
    manager.resume(state_of(0))
    save(manager, 0)
    proxy.choose = lambda request: "silent"
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"not there after 2 s \(it is being copied"):
        manager.wait_until_finished(2, remote=True)
    assert manager.finish(1, state_of(1))
    manager.close()
    assert time.monotonic() - began < 50
    with holdfast.open_run(fast) as run:
        assert run.latest_step() == 1
    began = time.monotonic()
    assert main(["stop", str(fast)]) == 0
    assert time.monotonic() - began < 60
    wait_until(lambda: not one_host.agent_processes())
    (text,) = [path.read_text() for path in (fast / "events").glob("agent-*.log")]
    assert "leaves" in text.splitlines()[-1]
    assert "Fatal" not in text


def test_a_start_that_cannot_reach_the_bucket_says_what_to_do(
    proxy: FaultProxy, proxied_url: str, tmp_path: Path
) -> None:
    proxy.choose = lambda request: "refused"
    rendezvous = Rendezvous(OwnProcess(), SystemClock())
    with pytest.raises(StorageError, match=r"open the remote tier of .*AccessDenied.*remote="):
        open_run(tmp_path / "fast", rendezvous, SystemClock(), proxied_url)


def test_an_agent_killed_in_the_middle_of_an_upload_leaves_no_half_checkpoint(
    one_host: Host, proxy: FaultProxy, proxied_url: str, tmp_path: Path
) -> None:
    fast, begun, goes_on = tmp_path / "fast", threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        # Neither this agent nor the next one ends its upload meanwhile.
        if "uploadId" in request.path:
            begun.set()
            assert goes_on.wait(240)

    with manager_of(fast, proxied_url) as manager:
        manager.resume(state_of(0))
        proxy.choose = hold
        save(manager, 0)
        assert begun.wait(240)
        pid = one_host.agent().pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        assert committed_in(proxied_url) == []
        goes_on.set()
        save(manager, 1)
        wait_until(lambda: committed_in(proxied_url)[-1:] == [1])
    check_remote(proxied_url, at_least=1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["uploadId", "part-", "manifests"])
def test_a_server_killed_in_the_middle_of_an_upload_stops_no_training_and_gets_it_later(
    kind: str, one_host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-s3-") as folder,
        running_server(Path(folder)) as server,
        running_proxy(server.port) as proxy,
    ):
        for name, value in server.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        url, fast, killed = f"s3://{BUCKET}/run", tmp_path / "fast", threading.Event()
        # The server makes a bucket with its first object.
        open_durable(f"s3://{BUCKET}/first", SystemClock()).put("object", b"1")
        lock = threading.Lock()

        def kill(request: Request) -> None:
            with lock:
                is_it = kind in request.path and request.method in ("PUT", "POST")
                if is_it and not killed.is_set():
                    server.kill()
                    killed.set()

        choose: Callable[[Request], str | None] = kill
        with manager_of(fast, url) as manager:
            manager.resume(state_of(0))
            proxy.choose = choose
            for step in range(3):
                save(manager, step)
            assert killed.wait(240)
            for step in range(3, 6):
                save(manager, step)
            server.start()
            wait_until(lambda: committed_in(url)[-1:] == [5], 120)
        with holdfast.open_run(fast) as run:
            assert run.all_steps()[-1] == 5
        check_remote(url, at_least=5)
