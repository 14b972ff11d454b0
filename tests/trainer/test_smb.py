"""A run on a share of a real SMB server, which has no links and refuses to rename open files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.format.names import RUN_FILE
from tests.hosts import Host, events, wait_until
from tests.store.smb_share import smb_share
from tests.trainer.job import check_went_on, run_job, seen, start_job

OPTIONS: dict[str, Any] = {"device_count": 1, "interval": 1, "sleep": 0.02}

pytestmark = pytest.mark.soak


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Path]:
    with smb_share(tmp_path / "smb") as mounted:
        (mounted / "a").write_bytes(b"a")
        with pytest.raises(PermissionError):
            os.link(mounted / "a", mounted / "b")
        with (mounted / "a").open("rb"), pytest.raises(OSError, match="busy"):
            (mounted / "a").rename(mounted / "b")
        (mounted / "a").unlink()
        yield mounted


def run_id(run: Path) -> str:
    return json.loads((run / RUN_FILE).read_bytes())["run_id"]


def test_a_training_that_is_killed_and_moved_goes_on(share: Path, one_host: Host) -> None:
    run = share / "run"
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
    assert main(["verify", str(run)]) == 0
    # While an agent has files of it open, the server refuses to move the run.
    assert one_host.agents() == [] or main(["stop", str(run)]) == 0
    wait_until(lambda: not one_host.agent_processes())
    before_id, moved = run_id(run), share / "moved"
    run.rename(moved)
    again = run_job([one_host], moved, **OPTIONS, steps=3)
    check_went_on(again, found[0]["start"] + 2)
    assert run_id(moved) == before_id
    assert main(["verify", str(moved)]) == 0


def test_one_state_is_saved_replaced_and_copied(share: Path, one_host: Host) -> None:
    for number in range(3):
        holdfast.save(share / "one", {"w": np.full(1000, number)}, overwrite=number > 0)
        assert holdfast.load(share / "one")["w"].tolist() == [number] * 1000
    assert os.listdir(share) == ["one"]
    assert main(["copy", str(share / "one"), str(share / "copy")]) == 0
    assert holdfast.load(share / "copy")["w"].tolist() == [2] * 1000
