import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.supervise.restarted_workers import LOOK_SECS, WAITING_SECS, RestartedWorkers
from tests.cli.command_line import await_line, training
from tests.hosts import Host, host
from tests.trust.in_process import StepClock

RESTARTED = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
LAUNCHER = (
    "import subprocess, sys\n"
    "worker = subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()'])\n"
    "sys.exit(worker.wait())\n"
)


class LaterClock(StepClock):
    """A clock that starts at the present time."""

    def __init__(self, secs: float) -> None:
        super().__init__(secs)
        self.began = datetime.now(UTC)

    def now(self) -> datetime:
        return self.began + timedelta(seconds=self.secs)


@contextmanager
def command(**variables: str) -> Iterator[int]:
    """A launcher with a worker that waits; these variables are in the environment of both."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdin is not None
        assert launcher.stdout.readline() == "1\n"
        yield launcher.pid
        launcher.stdin.write("\n")


def notes(pid: int, *secs: float) -> list[list[str]]:
    """What has been reported after so many seconds each."""
    clock, lines = LaterClock(secs=0.0), []
    workers = RestartedWorkers(clock, lines.append)
    counts = []
    for each in secs:
        clock.secs = each
        workers.look(pid)
        counts.append([*lines])
    return counts


@pytest.fixture(autouse=True)
def own_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with host() as single:
        monkeypatch.setenv("HOLDFAST_RAM", str(single.folder))
        yield single


def test_restarted_workers_without_a_run_are_reported_once() -> None:
    with command(**RESTARTED) as pid:
        early, late, later = notes(pid, LOOK_SECS, WAITING_SECS + 60, WAITING_SECS + 90)
    assert early == []
    (line,) = late
    assert "hang in init_process_group" in line
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line
    assert later == late


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"TORCHELASTIC_USE_AGENT_STORE": ""},
    ],
)
def test_first_workers_and_those_with_a_store_of_their_own_are_not_reported(
    change: dict[str, str],
) -> None:
    with command(**(RESTARTED | change)) as pid:
        assert notes(pid, WAITING_SECS + 60) == [[]]


def test_restarted_workers_that_train_are_not_reported(own_host: Host, tmp_path: Path) -> None:
    own_host.variables |= RESTARTED
    process = own_host.start(*training(tmp_path / "run", steps=10**6, sleep=0.02)[1:])
    await_line(process, "3")
    assert notes(process.pid, WAITING_SECS + 60) == [[]]
