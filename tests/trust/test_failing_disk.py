"""Check real processes on failing storage: the training continues, is notified, and saves again.

The agent's storage fails on purpose (`failing_agent`), or a disk of the test's own is full, frozen
or dead, for the agent and the trainer alike. A failure is reported once, with its step, at the next
save; no save waits for storage; once the storage works, the next save is durable.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.trainer.save.save_queue import PATIENCE_SECS
from tests.hosts import Host, host, wait_until
from tests.store.places import mounted
from tests.trust.failing_rig import (
    check_restorable,
    committed,
    fill_up,
    frozen,
    shut_down,
    small_disk,
    start_failing_agent,
    told,
    trainer,
)
from tests.trust.figures import tell

SAVE_SECS_MAX = 1.0
"""No save may wait for storage; on a shared machine a process may stand still for a while."""
BYTES = ["write", "sync", "truncate", "rename", "open"]


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made


def check_failures(told: list[tuple[int, int]], interval: int = 5) -> None:
    """Check that each failed step was due, and is reported once, later."""
    assert len({step for step, _ in told}) == len(told), f"told twice: {told}"
    assert all(step % interval == 0 and step < at for step, at in told), told


def failing_agent(host: Host, folder: Path, number: int) -> int:
    """The agent's disk fails for a while; returns how many saves failed."""
    run = folder / "run"
    agent = start_failing_agent(host, run, folder / "control")
    with trainer(host, run, folder / "until") as training:
        before = training.await_commit(run, -1)
        agent.fail("*/run/*", BYTES, errno=number)
        failed, _ = training.await_failure(before)
        training.go_on(20)
        assert committed(run) >= before, "the one before stays"
        agent.work()
        after = training.await_commit(run, max(failed, training.now()))
        assert training.end() == 0, training.told()
        check_failures(training.failures())
        assert training.said("finished")[0]["finished"]
        assert after not in told(run, "failed")
        assert check_restorable(run) >= after
        assert {step for step, _ in training.failures()} == set(told(run, "failed"))
        return len(training.failures())


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.soak)])
def test_training_goes_on_while_the_agents_disk_fails_and_the_next_save_works(
    one_host: Host, tmp_path: Path, number: int
) -> None:
    assert failing_agent(one_host, tmp_path, number) > 0


def check_stalled(host: Host, folder: Path, secs: float) -> tuple[int, float]:
    """Stalls the agent's disk; returns how many steps were made meanwhile, and the slowest save."""
    run = folder / "run"
    agent = start_failing_agent(host, run, folder / "control")
    with trainer(host, run, folder / "until") as training:
        before = training.await_commit(run, -1)
        agent.fail("*/run/*", ["sync"], stall_secs=secs)
        training.go_on(10)
        agent.work()
        first = training.now()
        training.await_commit(run, max(before, first))
        made, slowest = training.now() - first, training.slowest_save()
        assert training.end() == 0, training.told()
        assert training.failures() == []
    check_restorable(run)
    return made, slowest


@pytest.mark.soak
def test_a_disk_whose_syncs_stall_thirty_seconds_never_makes_save_wait(
    one_host: Host, tmp_path: Path
) -> None:
    made, slowest = check_stalled(one_host, tmp_path, secs=30.0)
    assert made > 100
    assert slowest < SAVE_SECS_MAX
    reached = f"{made} steps meanwhile, the slowest save {slowest * 1000:.0f} ms"
    tell("disk stalls 30 s, its syncs", "training goes on, no save waits", reached)


def check_frozen(
    host: Host, folder: Path, ram: dict | None, secs: float = 0.0
) -> tuple[int, float]:
    """As `check_stalled`, on a disk that is frozen, for the trainer too: for 60 steps at least."""
    with small_disk(folder / "disk", "64M") as disk:
        run = disk / "run"
        with trainer(host, run, folder / "until", ram=ram) as training:
            training.await_commit(run, -1)
            first = training.now()
            with frozen(disk):
                until = time.monotonic() + secs
                training.go_on(60)
                while time.monotonic() < until:
                    training.go_on(10)
            made = training.now() - first
            training.await_commit(run, training.now())
            assert training.end() == 0, training.told()
            assert training.failures() == []
            assert "is gone" not in "".join(training.errors), "the agent answers all the time"
        check_restorable(run)
        host.end()
        return made, training.slowest_save()


RAM = {"linger_secs": 30}
SOAK_RAM, SOAK_NONE = (
    pytest.param(RAM, marks=pytest.mark.soak),
    pytest.param(None, marks=pytest.mark.soak),
)
SOME_TIERS = pytest.mark.parametrize("ram", [RAM, SOAK_NONE], ids=["RAM", "no RAM"])
OTHER_TIERS = pytest.mark.parametrize("ram", [SOAK_RAM, None], ids=["RAM", "no RAM"])
TIERS = pytest.mark.parametrize("ram", [RAM, None], ids=["RAM", "no RAM"])


@SOME_TIERS
def test_a_frozen_disk_never_makes_save_wait(
    one_host: Host, tmp_path: Path, ram: dict | None
) -> None:
    # It trains on before the disk can take anything.
    check_frozen(one_host, tmp_path, ram)


@pytest.mark.soak
@TIERS
def test_a_disk_that_is_frozen_for_thirty_seconds_never_makes_save_wait(
    one_host: Host, tmp_path: Path, ram: dict | None
) -> None:
    made, slowest = check_frozen(one_host, tmp_path, ram, secs=30.0)
    assert slowest < SAVE_SECS_MAX
    name = "RAM" if ram else "no RAM"
    reached = f"{made} steps in 30 s, the slowest save {slowest * 1000:.0f} ms"
    tell(f"disk stalls 30 s, {name}", "training goes on, no save waits", reached)


@OTHER_TIERS
def test_training_goes_on_on_a_full_disk_and_saves_once_there_is_room(
    one_host: Host, tmp_path: Path, ram: dict | None
) -> None:
    with small_disk(tmp_path / "disk", "16M") as disk:
        run = disk / "run"
        with trainer(one_host, run, tmp_path / "until", ram=ram) as training:
            before = training.await_commit(run, -1)
            filler = fill_up(disk)
            # A checkpoint that is deleted leaves room for one more.
            wait_until(lambda: fill_up(disk) and any(s > before for s, _ in training.failures()))
            failed, _ = training.await_failure(before)
            training.go_on(20)
            assert committed(run) >= before, "the one before stays"
            filler.unlink()
            after = training.await_commit(run, max(failed, training.now()))
            assert training.end() == 0, training.told()
            check_failures(training.failures())
        assert check_restorable(run) >= after
        one_host.end()


@pytest.mark.soak
@TIERS
def test_a_trainer_on_a_dead_disk_trains_on_and_ends_in_time_with_an_error(
    one_host: Host, tmp_path: Path, ram: dict | None
) -> None:
    with small_disk(tmp_path / "disk", "64M") as disk:
        run = disk / "run"
        options = {"ram": ram, "ends_with_a_save": True}
        with trainer(one_host, run, tmp_path / "until", **options) as training:
            before = training.await_commit(run, -1)
            shut_down(disk)
            training.await_failure(before)
            training.go_on(20)
            assert training.slowest_save() < SAVE_SECS_MAX
            check_failures(training.failures())
            assert training.end(30) == 1, training.told()
            assert training.said("last"), training.told()
            assert "SaveFailedError" in "".join(training.errors)
        one_host.end()


LOGGING = """
import logging, sys
from pathlib import Path
from holdfast.host.log_file import logging_into

with logging_into(Path(sys.argv[1]), "host-a"):
    logging.warning("a line of the log")
"""


@pytest.mark.parametrize("is_full", [False, True], ids=["room", "no room"])
def test_an_agent_without_room_for_its_log_does_without(tmp_path: Path, is_full: bool) -> None:
    # The folder itself is the one thing that there is room for.
    options = "size=64k,nr_inodes=1" if is_full else "size=64k"
    with mounted("tmpfs", tmp_path / "run", options) as run:
        command = [sys.executable, "-c", LOGGING, str(run)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        log = run / "events" / "agent-host-a.log"
        said = done.stderr if is_full else log.read_text()
        assert said.endswith("WARNING root a line of the log\n")
        assert log.exists() != is_full


@pytest.mark.soak
def test_an_agent_that_does_not_answer_holds_a_save_up_for_a_moment_only(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with trainer(one_host, run, tmp_path / "until") as training:
        training.await_commit(run, -1)
        pid = one_host.agent().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            training.go_on(40)
        finally:
            os.kill(pid, signal.SIGCONT)
        training.await_commit(run, training.now())
        assert training.slowest_save() < 2 * PATIENCE_SECS + SAVE_SECS_MAX
        assert training.end() == 0, training.told()
        assert training.failures() == []
    check_restorable(run)
