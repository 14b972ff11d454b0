"""PyTorch on two hosts under what users do to a run: put it back, move it, lose a host."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.format.names import RUN_FILE
from tests.hosts import Host, expire_leases, wait_until
from tests.store.places import mounted
from tests.trainer.job import Job, lose, some_hosts
from tests.trainer.job import start_job as start_any_job
from tests.trainer.test_moved_runs import put_back
from tests.trust.failing_rig import committed, start_failing_agent
from tests.trust.test_failing_disk import BYTES

TRAINER = Path(__file__).with_name("rank_trainer.py")
LOST_SECS = 200.0
"""In which the others notice a lost host: 100 s without a message, and a busy machine."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="without PyTorch"),
]


@pytest.fixture
def four_hosts() -> Iterator[list[Host]]:
    with some_hosts(4) as hosts:
        yield hosts


def start_job(hosts: list[Host], run: Path, **todo: Any) -> Job:
    return start_any_job(hosts, run, script=TRAINER, framework="torch", every=5, **todo)


def trained(hosts: list[Host], run: Path, more: int, branch: int, **todo: Any) -> list[int]:
    """Trains some more steps; returns the branches of the state from which all ranks went on."""
    found = start_job(hosts, run, more=more, branch=branch, **todo).results(300)
    assert all(r["trail"] == r["own"] == found[0]["trail"] for r in found), found
    assert len(found[0]["trail"]) == found[0]["start"]
    return found[0]["trail"]


def run_id_of(run: Path) -> str:
    return json.loads((run / RUN_FILE).read_bytes())["run_id"]


def await_step(job: Job, step: int) -> None:
    for rank in job.ranks:
        rank.await_line("step", lambda line: line["step"] >= step, 120)


def test_a_run_that_was_put_back_and_trained_elsewhere_is_no_mix(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    run, backup, (here, there) = (
        tmp_path / "run",
        tmp_path / "backup",
        (four_hosts[:2], four_hosts[2:]),
    )
    trained(here, run, 8, branch=1)
    for one in here:
        one.kill_agents()
    shutil.copytree(run, backup)
    # Newer steps are on disk and in RAM, which outlives its agents.
    job = start_job(here, run, more=1000, branch=1, sleep=0.05)
    await_step(job, 17)
    job.kill()
    for one in here:
        one.kill_agents()
    put_back(backup, run)
    expire_leases(run)
    assert trained(there, run, 4, branch=2) == [1] * 8
    for one in there:
        one.kill_agents()
    expire_leases(run)
    assert trained(here, run, 3, branch=3) == [1] * 8 + [2] * 4


def test_a_run_that_is_moved_across_file_systems_goes_on_from_the_step_in_ram(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    hosts = four_hosts[:2]
    with mounted("tmpfs", tmp_path / "other") as other:
        run, moved = tmp_path / "run", other / "run"
        job = start_job(hosts, run, more=1000, branch=1, sleep=0.05)
        await_step(job, 17)
        subprocess.run(["mv", str(run), str(moved)], check=False, capture_output=True)
        # A training that writes meanwhile may keep `mv` from removing what it has moved.
        wait_until(lambda: shutil.rmtree(run, ignore_errors=True) or not run.exists())
        codes = [rank.wait(120) for rank in job.ranks]
        assert codes == [1, 1], job.told()
        assert any("keeps step" in "".join(rank.errors) for rank in job.ranks), job.told()
        assert len(trained(hosts, moved, 3, branch=2)) >= 17


@pytest.mark.parametrize("call", ["resume", "finish"])
def test_the_others_do_not_wait_an_hour_for_a_rank_whose_host_is_lost_before_the_call(
    four_hosts: list[Host], tmp_path: Path, call: str
) -> None:
    hosts, run = four_hosts[:2], tmp_path / "run"
    trained(hosts, run, 8, branch=1)
    job = start_job(hosts, run, more=4, branch=2, stands=[1, call])
    job.ranks[1].await_line("stands", secs=120)
    lose(hosts[1])
    assert job.ranks[0].wait(LOST_SECS) == 1, job.told()
    said = "".join(job.ranks[0].errors)
    assert "ProcessLostError" in said
    assert "rank 1 (on host-b) of 2 sent no heartbeat for 100 s" in said
    expire_leases(run)
    assert trained(hosts, run, 3, branch=3)[:8] == [1] * 8


def test_a_full_disk_on_one_of_two_hosts_loses_nothing_and_is_named(
    four_hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, run = four_hosts[:2], tmp_path / "run"
    monkeypatch.setenv("HOLDFAST_RAM", str(hosts[1].folder))
    monkeypatch.setenv("HOLDFAST_HOST", hosts[1].name)
    agent = start_failing_agent(hosts[1], run, tmp_path / "control", has_peers=True)
    job = start_job(hosts, run, more=1000, branch=1, sleep=0.05)
    job.wait_until(lambda: committed(run) >= 10)
    agent.fail("*/run/*", BYTES, errno=errno.ENOSPC)
    before = committed(run)
    failed = [rank.await_line("failed", secs=120) for rank in job.ranks]
    for line in failed:
        assert min(line["failed"]) > before - 5, line
        assert "host-b" in line["message"], line
        assert "No space left on device" in line["message"], line
    await_step(job, failed[0]["at"] + 20)
    agent.work()
    job.wait_until(lambda: committed(run) > failed[0]["at"] + 20)
    for rank in job.ranks:
        steps = [step for line in rank.said("failed") for step in line["failed"]]
        assert len(steps) == len(set(steps)), steps
    job.kill()
    for one in hosts:
        one.kill_agents()
    expire_leases(run)
    newest = committed(run)
    assert len(trained(hosts, run, 3, branch=2)) > newest


@pytest.mark.parametrize("method", ["should_save", "should_preserve"])
def test_a_policy_that_hangs_is_named_and_holds_no_other_rank(
    four_hosts: list[Host], tmp_path: Path, method: str
) -> None:
    hosts, run = four_hosts[:2], tmp_path / "run"
    job = start_job(hosts, run, more=300, branch=1, sleep=0.05, hangs=method)
    job.ranks[0].await_line("hangs", secs=120)
    # Saves that built-in policies choose go on, and the other rank closes while rank 0 waits.
    job.ranks[1].await_line("closed", secs=120)
    assert not job.ranks[0].said("closed")
    job.ranks[0].await_line("closed", secs=120)
    said = "".join(job.ranks[0].errors)
    assert f"Hangs.{method} has not returned for 10 s" in said, job.told()
    assert f"Hangs.{method} did not return within 60 s, and is abandoned" in said, job.told()
    assert committed(run) == 299


def test_a_policy_that_exits_is_reported_and_saves_go_on(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    hosts, run = four_hosts[:2], tmp_path / "run"
    job = start_job(hosts, run, more=100, branch=1, sleep=0.05, hangs="exits")
    ranks = job.results(300)
    assert "Hangs.should_save raised SystemExit: enough" in ranks[0]["exited"]
    assert "exited" not in ranks[1]
    assert all(rank["closed"] for rank in ranks)
    assert committed(run) == 99


def test_a_directory_that_was_put_back_and_a_moved_remote_tier_cost_nothing(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    hosts, run, backup = four_hosts[:2], tmp_path / "run", tmp_path / "backup"
    remote, moved = tmp_path / "remote", tmp_path / "moved"
    trained(hosts, run, 8, branch=1, remote=str(remote))
    for one in hosts:
        one.kill_agents()
    shutil.copytree(run, backup)
    assert trained(hosts, run, 6, branch=2, remote=str(remote)) == [1] * 8
    for one in hosts:
        one.kill_agents()
        shutil.rmtree(one.folder)
        one.folder.mkdir()
    put_back(backup, run)
    before = run_id_of(run)
    assert trained(hosts, run, 2, branch=3, remote=str(remote)) == [1] * 8 + [2] * 6
    for one in hosts:
        one.kill_agents()
    remote.rename(moved)
    assert trained(hosts, run, 2, branch=4, remote=str(moved)) == [1] * 8 + [2] * 6 + [3] * 2
    assert run_id_of(run) == run_id_of(moved) == before


def test_a_takeover_from_another_place_on_the_same_hosts_goes_on_from_the_live_training(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    hosts, run, other = four_hosts[:2], tmp_path / "run", tmp_path / "other"
    remote = str(tmp_path / "remote")
    job = start_job(hosts, run, more=1000, branch=1, sleep=0.05, remote=remote)
    await_step(job, 17)
    job.wait_until(lambda: committed(Path(remote)) > 4)
    trail = trained(hosts, other, 3, branch=2, remote=remote, takeover=True)
    assert trail == [1] * len(trail)
    assert len(trail) > 4
    for rank in job.ranks:
        assert rank.wait(120) == 1, job.told()
    assert any("FencedError" in "".join(rank.errors) for rank in job.ranks), job.told()


def test_an_object_that_refuses_its_state_on_one_rank_ends_all(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    hosts, run = four_hosts[:2], tmp_path / "run"
    trained(hosts, run, 8, branch=1)
    job = start_job(hosts, run, more=4, branch=2, refuses=1)
    assert [rank.wait(240) for rank in job.ranks] == [1, 1], job.told()
    assert "data" in "".join(job.ranks[1].errors)
    assert "this rank has other data" in "".join(job.ranks[1].errors)
    assert trained(hosts, run, 3, branch=3) == [1] * 8
