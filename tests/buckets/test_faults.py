"""Runs in a bucket whose service fails: each request may, in any way, and the server may die."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager, preservation_policy
from holdfast.clock import SystemClock
from holdfast.errors import CheckpointDamagedError, HoldfastError, SaveFailedError, StorageError
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from holdfast.store.location import open_durable
from tests.buckets.fault_proxy import FAULTS, FaultProxy, Request, running_proxy, seeded
from tests.buckets.s3_server import BUCKET, running_server
from tests.buckets.test_runs import check, state_of
from tests.hosts import Host, wait_until


@pytest.fixture
def url(proxied_url: str) -> str:
    return proxied_url


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_outlasted_at_every_kind_of_request(
    fault: str, proxy: FaultProxy, url: str
) -> None:
    store = open_durable(url, SystemClock())
    data = bytes(range(256)) * 80_000
    failed: set[str] = set()

    def first_of_its_kind(request: Request) -> str | None:
        kind = f"{request.method} {'?' in request.path}"
        if kind in failed:
            return None
        failed.add(kind)
        return fault

    proxy.choose = first_of_its_kind
    store.put("small", b"1")
    store.put("large", data)
    assert store.put_if_absent("record", b"mine")
    assert not store.put_if_absent("record", b"another's")
    assert store.get("record") == b"mine"
    with store.open("large") as reader:
        found = bytearray(len(data))
        reader.read_into(0, memoryview(found))
    assert found == data
    store.put("a/1", b"1")
    assert [stored.key for stored in store.list("a")] == ["a/1"]
    store.delete("small", "a/1")
    assert [*store.list("a")] == []
    assert proxy.counts[fault] >= 4


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_a_store_does_what_a_dict_does_under_random_faults(
    seed: int, proxy: FaultProxy, url: str
) -> None:
    store, random_of = open_durable(url, SystemClock()), random.Random(seed)
    proxy.choose = seeded(seed, 0.25)
    right: dict[str, bytes] = {}
    for number in range(120):
        key = f"a/{random_of.randrange(8)}"
        data = b"%d" % number
        match random_of.randrange(4):
            case 0:
                store.put(key, data)
                right[key] = data
            case 1:
                assert store.put_if_absent(key, data) == (key not in right)
                right.setdefault(key, data)
            case 2:
                store.delete(key)
                right.pop(key, None)
            case _:
                found = {stored.key: store.get(stored.key) for stored in store.list("a")}
                assert found == right
    assert sum(proxy.counts[fault] for fault in FAULTS) > 20


def saved_steps(url: str, steps: range) -> list[int]:
    """Trains with a save of every step, and returns those that were acknowledged as durable."""
    acknowledged = []
    keep = preservation_policy.LatestN(None)
    with CheckpointManager(url, preservation_policy=keep) as manager:
        manager.resume(state_of(0))
        for step in steps:
            try:
                manager.save(step, state_of(step), force=True)
                manager.wait_until_finished()
            except SaveFailedError:
                continue
            acknowledged.append(step)
    return acknowledged


def test_the_last_step_is_kept_if_the_service_fails_when_the_training_ends(
    one_host: Host, proxy: FaultProxy, url: str
) -> None:
    def end_outage() -> None:
        proxy.choose = lambda request: None

    with CheckpointManager(url, save_decision_policy=FixedIntervalPolicy(4)) as manager:
        manager.resume(state_of(0))
        for step in range(6):
            manager.save(step, state_of(step))
        proxy.choose = lambda request: "reset before"
        # Longer than the tries of one request.
        outage = threading.Timer(8, end_outage)
        outage.start()
        try:
            assert manager.finish(5, state_of(5))
        finally:
            outage.join()
    with holdfast.open_run(url) as run:
        assert run.latest_step() == 5
        check(run.restore(5), 5)


def test_training_goes_on_through_faults_and_nothing_acknowledged_is_lost(
    one_host: Host, proxy: FaultProxy, url: str
) -> None:
    proxy.choose = seeded(7, 0.15)
    steps = saved_steps(url, range(1, 7))
    assert len(steps) >= 5
    with holdfast.open_run(url) as run:
        found = run.all_steps()
        assert set(steps) <= set(found)
        check(run.restore(steps[-1]), steps[-1])
    proxy.choose = lambda request: None
    with holdfast.open_run(url) as run:
        for step in found:
            check(run.restore(step), step)


def test_wrong_bytes_of_an_image_are_found_and_right_ones_read_later(
    one_host: Host, proxy: FaultProxy, url: str
) -> None:
    with CheckpointManager(url, ram=None) as manager:
        manager.save(1, state_of(1), force=True)
    proxy.choose = lambda request: (
        "wrong byte" if request.method == "GET" and "safetensors" in request.path else None
    )
    with holdfast.open_run(url) as run:
        with pytest.raises(CheckpointDamagedError, match="safetensors"):
            run.restore(1)
        proxy.choose = lambda request: None
        check(run.restore(1), 1)


def test_a_slow_service_delays_no_training(one_host: Host, proxy: FaultProxy, url: str) -> None:
    with CheckpointManager(url) as manager:
        manager.resume(state_of(0))
        proxy.rate = 2e6
        manager.save(1, state_of(1), force=True)
        assert manager.save(2, state_of(2), force=True)
        proxy.rate = None
        manager.wait_until_finished()
    assert holdfast.open_run(url).latest_step() == 2


@pytest.mark.soak
def test_a_server_killed_in_the_middle_of_an_upload_loses_nothing_acknowledged(
    one_host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-s3-") as folder,
        running_server(Path(folder)) as server,
        running_proxy(server.port) as proxy,
    ):
        for name, value in server.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/run"
        # The server makes a bucket with its first object.
        open_durable(f"s3://{BUCKET}/first", SystemClock()).put("object", b"1")
        steps = saved_steps(url, range(1, 3))
        keep, lock = preservation_policy.LatestN(None), threading.Lock()
        for kind in ("uploadId", "manifest", "part-"):
            killed: list[int] = []

            def kill(request: Request, kind: str = kind, killed: list[int] = killed) -> None:
                with lock:
                    if kind in request.path and request.method in ("PUT", "POST") and not killed:
                        server.kill()
                        killed.append(1)

            with CheckpointManager(url, preservation_policy=keep) as manager:
                step, _ = manager.resume(state_of(0))
                assert step == steps[-1] + 1
                proxy.choose = kill
                manager.save(step, state_of(step), force=True)
                wait_until(lambda killed=killed: bool(killed))
                server.start()
                try:
                    manager.wait_until_finished()
                except HoldfastError:
                    manager.save(step + 1, state_of(step + 1), force=True)
                    manager.wait_until_finished()
                    step += 1
                steps.append(step)
        with holdfast.open_run(url) as run:
            assert set(steps) <= set(run.all_steps())
            for step in run.all_steps():
                check(run.restore(step), step)


def test_a_service_that_does_not_answer_is_an_error_in_bounded_time(
    proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.bucket.object_service.REQUEST_SECS", 1)
    monkeypatch.setattr("holdfast.store.bucket.bucket.TRIES_MAX", 2)
    proxy.choose = lambda request: "silent"
    store = open_durable(url, SystemClock())
    with pytest.raises(StorageError, match="read"):
        store.get("key")
    assert proxy.counts["silent"] >= 2


@pytest.mark.soak
def test_a_server_killed_in_the_middle_of_a_delete_leaves_what_is_to_be_kept(
    one_host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-s3-") as folder,
        running_server(Path(folder)) as server,
        running_proxy(server.port) as proxy,
    ):
        for name, value in server.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        url, killed, lock = f"s3://{BUCKET}/run", threading.Event(), threading.Lock()
        # The server makes a bucket with its first object.
        open_durable(f"s3://{BUCKET}/first", SystemClock()).put("object", b"1")

        def kill(request: Request) -> None:
            is_deletion = request.method == "DELETE" or "delete" in request.path
            with lock:
                if is_deletion and not killed.is_set():
                    server.kill()
                    killed.set()

        newest = preservation_policy.LatestN(1)
        with CheckpointManager(url, preservation_policy=newest) as manager:
            manager.resume(state_of(0))
            manager.save(1, state_of(1), force=True)
            manager.wait_until_finished()
            # The next one's commit deletes this one.
            proxy.choose = kill
            manager.save(2, state_of(2), force=True)
            wait_until(killed.is_set)
            server.start()
            manager.wait_until_finished()
            manager.save(3, state_of(3), force=True)
            manager.wait_until_finished()
        with holdfast.open_run(url) as run:
            assert run.all_steps()[-1] == 3
            for step in run.all_steps():
                check(run.restore(step), step)


def test_a_save_through_a_service_of_1_mb_a_second_ends(
    one_host: Host, proxy: FaultProxy, url: str
) -> None:
    with CheckpointManager(url) as manager:
        manager.resume({"w": np.zeros(10, np.uint8)})
        proxy.rate = 1e6
        state = {"w": np.arange(2_000_000, dtype=np.uint8)}
        assert manager.save(1, state, force=True)
        manager.wait_until_finished()
    proxy.rate = None
    assert np.array_equal(holdfast.open_run(url).restore(1)["w"], state["w"])
