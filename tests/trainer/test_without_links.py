"""A run on a file system without hard links, a FUSE mount: it trains, and comes back from kills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from tests.hosts import Host, await_events, events
from tests.store.places import linkless
from tests.trainer.job import check_went_on, run_job, seen, start_job
from tests.trainer.test_two_attempts import start_two_at_once

OPTIONS: dict[str, Any] = {"device_count": 1, "interval": 1, "sleep": 0.02}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    with linkless(tmp_path / "mount") as folder:
        (folder / "a").touch()
        with pytest.raises(OSError, match="not supported"):
            os.link(folder / "a", folder / "b")
        (folder / "a").unlink()
        yield folder


def test_a_training_that_is_killed_goes_on_with_and_without_its_agent(
    mount: Path, one_host: Host
) -> None:
    run = mount / "run"
    for number in range(2):
        job = start_job([one_host], run, **OPTIONS, steps=10**6)
        job.wait_until(lambda number=number: len(events(run, "attempt_started")) > number)
        before = max(seen(run, "committed"), default=0)
        job.wait_until(lambda before=before: max(seen(run, "committed"), default=0) > before + 3)
        if number:
            one_host.kill_with_agent(job.ranks[0].process)
        job.kill()
    newest = max(seen(run, "committed"))
    found = run_job([one_host], run, **OPTIONS, steps=3)
    assert found[0]["start"] > newest
    check_went_on(found, found[0]["start"] - 1)
    assert len(await_events(run, "attempt_started", count=3)) == 3
    assert not [path for path in run.rglob(".*") if path.parent.name != "events"]


@pytest.mark.soak
def test_a_job_of_two_hosts_trains_there(mount: Path, two_hosts: list[Host]) -> None:
    found = run_job(two_hosts, mount / "run", **OPTIONS, lockstep=True, steps=5)
    assert [result["start"] for result in found] == [0, 0]
    found = run_job(two_hosts[::-1], mount / "run", **OPTIONS, lockstep=True, steps=3)
    check_went_on(found, found[0]["start"] - 1)


@pytest.mark.soak
def test_of_two_starts_at_once_one_wins_and_has_the_only_attempt(
    mount: Path, two_hosts: list[Host]
) -> None:
    start_two_at_once(two_hosts, two_hosts[::-1], mount)


def test_one_state_is_saved_replaced_copied_and_removed(mount: Path, one_host: Host) -> None:
    for number in range(3):
        holdfast.save(mount / "one", {"w": np.full(1000, number)}, overwrite=number > 0)
        assert holdfast.load(mount / "one")["w"].tolist() == [number] * 1000
    assert os.listdir(mount) == ["one"]
    with holdfast.CheckpointManager(mount / "run") as manager:
        for step in range(3):
            manager.save(step, {"w": np.full(9, step)}, force=True)
    assert main(["copy", str(mount / "run"), str(mount / "copy")]) == 0
    assert main(["rm", str(mount / "copy"), "0", "--yes"]) == 0
    with holdfast.open_run(mount / "copy") as copied:
        assert copied.all_steps() == [1, 2]
    assert main(["verify", str(mount / "copy")]) == 0
    assert holdfast.load(mount / "copy")["w"].tolist() == [2] * 9
