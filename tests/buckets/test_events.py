"""Events of a run in a bucket: other hosts read them there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast import CheckpointManager
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.format.names import EVENTS
from holdfast.observe.events.reader import EventReader
from holdfast.observe.events.schema import CheckpointCommitted, Event
from holdfast.store.bucket.bucket import BucketStore
from holdfast.store.location import open_durable
from tests.buckets.s3_server import SECRET_KEY
from tests.buckets.test_runs import run_command, state_of, train
from tests.hosts import Host, host, wait_until


def on_another_host(monkeypatch: pytest.MonkeyPatch, other: Host) -> None:
    monkeypatch.setenv("HOLDFAST_RAM", str(other.folder))
    monkeypatch.setenv("HOLDFAST_HOST", f"{other.name}-elsewhere")
    monkeypatch.setenv("HOLDFAST_STATE", str(other.folder / "state"))


def committed(url: str) -> list[tuple[str, int]]:
    """The host and the step of each commit, as a reader here finds them."""
    found = list(EventReader(open_durable(url, SystemClock()).home).read())
    assert all(isinstance(one, Event) for one in found), found
    return [(one.host, one.step) for one in found if isinstance(one, CheckpointCommitted)]


def test_events_reports_and_advice_are_had_on_another_host(
    one_host: Host,
    some_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(some_url, 1, 2)
    run_command("stop", some_url)
    here = committed(some_url)
    assert [step for _, step in here] == [1, 2]
    with host() as other:
        on_another_host(monkeypatch, other)
        assert committed(some_url) == here
        train(some_url, 3)
        run_command("stop", some_url)
        both = committed(some_url)
        assert [step for _, step in both] == [1, 2, 3]
        assert len({name for name, _ in both}) == 2
        capsys.readouterr()
        assert main(["events", some_url, "--kind", "committed", "--json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
        for command in ("report", "advise"):
            assert main([command, some_url]) == 0
    monkeypatch.setenv("HOLDFAST_HOST", one_host.name)


def test_events_that_two_buckets_of_a_run_have_are_read_once(
    one_host: Host, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(url, remote=f"{url}-archive") as manager:
        manager.resume(state_of(0))
        manager.save(1, state_of(1), force=True)
        manager.wait_until_finished(60, remote=True)
    run_command("stop", url)
    with host() as other:
        on_another_host(monkeypatch, other)
        for place in (url, f"{url}-archive"):
            lines = run_command("events", place, "--json").splitlines()
            assert len(lines) == len({*lines}) > 5


def test_what_a_killed_agent_has_not_uploaded_the_next_one_of_its_host_uploads(
    one_host: Host, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(url, 1)
    store = open_durable(url, SystemClock())
    # The agent writes its events after the save is finished.
    wait_until(lambda: [step for _, step in committed(url)] == [1])
    one_host.kill_agent()
    assert list(store.list(EVENTS)) == []
    train(url, 2)
    run_command("stop", url)
    with host() as other:
        on_another_host(monkeypatch, other)
        assert [step for _, step in committed(url)] == [1, 2]


def test_neither_the_token_nor_credentials_are_in_the_bucket(one_host: Host, url: str) -> None:
    train(url, 1)
    run_command("stop", url)
    store = open_durable(url, SystemClock())
    assert isinstance(store, BucketStore)
    keys = list(store.all_keys())
    assert any(key.startswith("events/") for key in keys)
    assert not any("token" in key or key.endswith(".log") for key in keys)
    for key in keys:
        data = store.get(key)
        assert SECRET_KEY.encode() not in data
        assert os.environ["AWS_ACCESS_KEY_ID"].encode() not in data


def test_a_host_without_the_bucket_reads_its_own_events_and_says_why(
    one_host: Host, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(url, 1)
    run_command("stop", url)
    home = open_durable(url, SystemClock()).home
    monkeypatch.setattr("holdfast.store.bucket.bucket.TRIES_MAX", 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    first, *events = EventReader(home).read()
    assert "refuses the credentials" in first.reason
    assert [e.step for e in events if isinstance(e, CheckpointCommitted)] == [1]
    assert Path(os.environ["HOLDFAST_STATE"]).is_dir()
