"""Runs at s3:// URLs, against a real server of its own process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt, read_attempts
from holdfast.errors import NotARunError, StorageError
from holdfast.format.names import AttemptId
from holdfast.store.location import open_durable
from holdfast.trainer.checks import storage_checks
from holdfast.trainer.checks.check_results import Severity
from holdfast.trainer.checks.storage_checks import check_storage
from holdfast.trainer.run_copies import copy_run
from tests import prepared
from tests.hosts import Host, ending, finished, host

State = dict[str, np.ndarray]
DYING_TRAINER = """
import os, signal, sys
from holdfast import CheckpointManager
from tests.buckets.test_runs import state_of
manager = CheckpointManager(sys.argv[1])
manager.resume(state_of(0))
manager.save(4, state_of(4), force=True)
manager.wait_until_finished()
os.kill(os.getpid(), signal.SIGKILL)
"""


def state_of(step: int) -> State:
    # Larger than one part of an upload.
    return {"w": np.full(5_000_000, step, np.float32), "b": np.arange(step, step + 10)}


def train(url: str, *steps: int) -> None:
    with CheckpointManager(url) as manager:
        manager.resume(state_of(0))
        for step in steps:
            manager.save(step, state_of(step), force=True)
        manager.wait_until_finished()


def check(found: State, step: int) -> None:
    for name, array in state_of(step).items():
        assert np.array_equal(found[name], array)


def run_command(*arguments: str) -> str:
    command = ["-m", "holdfast", *arguments]
    with ending(prepared.start("commands", command, os.environ)) as process:
        return finished(process)


def test_a_run_in_a_bucket_is_resumed_and_read_on_another_host(
    one_host: Host, any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(any_url, 1, 2)
    with CheckpointManager(any_url) as manager:
        step, found = manager.resume(state_of(0))
        assert step == 3
        check(found, 2)
        manager.save(3, state_of(3), force=True)
    run = holdfast.open_run(any_url)
    assert run.latest_step() == 3
    with host() as other:
        monkeypatch.setenv("HOLDFAST_RAM", str(other.folder))
        monkeypatch.setenv("HOLDFAST_HOST", f"{other.name}-elsewhere")
        monkeypatch.setenv("HOLDFAST_STATE", str(other.folder / "state"))
        check(holdfast.open_run(any_url).restore(like=state_of(0)), 3)
        with CheckpointManager(any_url) as manager:
            step, found = manager.resume(state_of(0))
            assert step == 4
            check(found, 3)


def test_a_killed_trainer_loses_nothing_that_was_durable(one_host: Host, some_url: str) -> None:
    train(some_url, 1, 2)
    trainer = one_host.start("-c", DYING_TRAINER, some_url, stem="numpy")
    assert trainer.wait(240) == -signal.SIGKILL
    one_host.kill_agent()
    for left in one_host.folder.iterdir():
        shutil.rmtree(left)
    run = holdfast.open_run(some_url)
    assert run.latest_step() == 4
    check(run.restore(like=state_of(0)), 4)
    train(some_url, 5)
    assert holdfast.open_run(some_url).latest_step() == 5
    run_command("stop", some_url)


def test_of_two_attempts_that_begin_at_once_one_wins(any_url: str) -> None:
    stores = [open_durable(any_url, SystemClock()) for _ in range(8)]

    def begin(pid: int) -> bool:
        start = AttemptStart(
            run_id="run", origin=None, host="host", pid=pid, time=datetime.now(UTC)
        )
        return begin_attempt(stores[pid], AttemptId.of_start(1, f"{pid}"), start) is not None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begin, range(8))) == 1
    assert [*read_attempts(stores[0])] == [1]


def test_commands_take_urls(one_host: Host, some_url: str) -> None:
    train(some_url, 1, 2, 3)
    assert "3" in run_command("ls", some_url)
    run_command("verify", some_url)
    run_command("rm", some_url, "2", "--yes")
    assert holdfast.open_run(some_url).all_steps() == [1, 3]


def test_rm_on_a_host_that_has_no_files_of_the_run_uploads_the_event(
    one_host: Host, some_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(some_url, 1, 2)
    run_command("stop", some_url)
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "new"))
    command = [sys.executable, "-m", "holdfast", "rm", some_url, "1", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("removed 1 checkpoint", "")
    assert '"deleted"' in run_command("events", some_url, "--json")


def test_a_run_is_copied_to_a_bucket_and_back(
    one_host: Host, some_url: str, tmp_path: Path
) -> None:
    train(str(tmp_path / "run"), 1, 2)
    run_command("copy", str(tmp_path / "run"), some_url)
    run_command("copy", some_url, str(tmp_path / "back"))
    run_command("verify", some_url)
    for place in (some_url, tmp_path / "back"):
        with holdfast.open_run(place) as found:
            assert found.all_steps() == [1, 2]
            check(found.restore(2), 2)
    train(some_url, 3)
    with pytest.raises(NotARunError, match="choose a new place"):
        copy_run(tmp_path / "run", some_url)


def test_the_doctor_tries_a_bucket_and_leaves_it_as_it_was(
    one_host: Host, some_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine is not what is tried.
    for limit, value in (("SLOW_SECS", 60.0), ("SLOW_BYTES_PER_SEC", 0.0), ("SKEW_SECS_MAX", 60.0)):
        monkeypatch.setattr(storage_checks, limit, value)
    clock = SystemClock()
    found = list(check_storage(some_url, clock))
    assert {result.severity for result in found} == {Severity.NOTE, Severity.OK}
    assert not [*open_durable(some_url, clock).list("leases")]
    assert open_durable(some_url, clock).is_unused()
    scheme = some_url.partition("://")[0]
    problems = check_storage(f"{scheme}://no-such-bucket/run", clock)
    assert Severity.PROBLEM in {result.severity for result in problems}


def test_a_prefix_with_other_objects_is_no_run_and_stays_as_it_is(one_host: Host, url: str) -> None:
    store = open_durable(url, SystemClock())
    store.put("other", b"data")
    with pytest.raises(NotARunError, match="an empty prefix"):
        CheckpointManager(url)
    assert list(store.all_keys()) == ["other"]


def test_a_bucket_that_does_not_exist_is_one_clear_error(one_host: Host, url: str) -> None:
    with pytest.raises(StorageError, match=r"expected a bucket, found none.*create it"):
        holdfast.open_run("s3://no-such-bucket/run")


def test_refused_credentials_are_one_clear_error_without_the_secret(
    one_host: Host, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-3141")
    with pytest.raises(StorageError, match="refuses the credentials") as caught:
        CheckpointManager(url)
    assert "3141" not in str(caught.value)
    assert os.environ["AWS_ACCESS_KEY_ID"] not in str(caught.value)
