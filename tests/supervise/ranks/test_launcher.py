"""The launcher starts, ends and replaces processes: here of a few lines, without PyTorch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping

import pytest

from holdfast.clock import SystemClock
from holdfast.supervise.command import spawn
from holdfast.supervise.own_folder import own_folder
from holdfast.supervise.ranks import launcher, leading
from holdfast.supervise.ranks.launcher import ENDING, Launcher
from holdfast.supervise.ranks.membership import START_SECS, Settings

MEMBER = """
import json, os, signal, socket, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
link = socket.socket(fileno=int(os.environ["HOLDFAST_MEMBER"]))
lines = link.makefile("r")

def report(kind, **fields):
    link.sendall(json.dumps({"type": kind, **fields}).encode() + b"\\n")

if json.loads(sys.argv[1]).get("start") == "wait":
    time.sleep(600)
report("Ready")
generation = 0
for line in lines:
    order = json.loads(line)
    if order["type"] == "Released":
        if json.loads(sys.argv[1]).get("spare") == "signal" and not generation:
            os.kill(os.getppid(), 15)
            os.kill(os.getpid(), 15)
        sys.exit(0)
    if order["type"] == "Reraise":
        sys.exit(7)
    if order["type"] == "Broken":
        report("Left", generation=order["generation"], last_step=5, text="closed by peer")
    if order["type"] == "Assigned":
        generation = order["generation"]
        does = json.loads(sys.argv[1]).get(f"{generation}:{order['rank']}")
        if does == "fail":
            report("Failed", generation=generation, text="ValueError: bad batch")
        elif does == "die":
            os.kill(os.getpid(), 9)
        elif does == "interrupt":
            os.kill(os.getppid(), 2)
            os.kill(os.getpid(), 2)
        elif does == "hang":
            lines.readline()
            lines.readline()
        elif does != "wait":
            report("Finished", generation=generation)
"""


class Store:
    """A store that nobody asks."""

    address = "127.0.0.1:1"
    open_count = 0

    def __init__(self, address: str) -> None:
        Store.open_count += 1

    def close(self) -> None:
        Store.open_count -= 1


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """Set the handlers of signals back, which a launcher has as a process of its own."""
    numbers = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def launched(
    does: Mapping[str, str],
    settings: Settings,
    command: str = sys.executable,
    notes: list[str] | None = None,
) -> tuple[int, list[str]]:
    """Run a job; return its exit code, and what it has shown, which is added to `notes`."""
    notes = [] if notes is None else notes
    words = [command, "-S", "-c", MEMBER, json.dumps(does)]

    def start(variables: Mapping[str, str], kept_fd: int) -> int:
        return spawn(words, os.environ | dict(variables), [kept_fd], group=None)

    with own_folder() as folder:
        code = Launcher(start, settings, lambda: Store, SystemClock(), notes.append, folder).run()
    assert Store.open_count == 0
    return code, notes


def size(spares: int = 1, ranks_min: int = 2, leave_secs: float = 60.0) -> Settings:
    return Settings(ranks=2, spares=spares, ranks_min=ranks_min, leave_secs=leave_secs)


def test_a_job_ends_when_all_its_ranks_have_finished() -> None:
    assert launched({}, size()) == (0, [])


def test_a_signal_that_ends_a_spare_after_the_ranks_have_finished_changes_nothing() -> None:
    code, notes = launched({"spare": "signal"}, size())
    assert (code, notes) == (0, [])


def test_a_spare_takes_the_place_of_a_killed_rank() -> None:
    code, notes = launched({"1:0": "wait", "1:1": "die"}, size())
    assert code == 0
    assert "ended by SIGKILL" in notes[0]
    assert notes[1] == "holdfast run: generation 2: 2 ranks; lost before: 1"


def test_a_rank_whose_failure_is_its_own_ends_and_is_replaced() -> None:
    code, notes = launched({"1:0": "wait", "1:1": "fail"}, size())
    assert code == 0
    assert "of a rank: exit code 7" in notes[0]


def test_a_rank_that_does_not_leave_is_killed() -> None:
    code, notes = launched({"1:0": "hang", "1:1": "die"}, size(leave_secs=0.5))
    assert code == 0
    assert "did not leave its generation" in notes[1]
    assert notes[-1] == "holdfast run: generation 2: 2 ranks; lost before: 0, 1"


def test_an_interrupted_job_has_the_code_of_its_ranks_and_says_nothing_of_them() -> None:
    code, notes = launched({"1:0": "interrupt", "1:1": "wait"}, size())
    assert (code, notes) == (128 + signal.SIGINT, [])


def test_a_job_that_is_given_up_has_the_code_of_its_last_lost_rank() -> None:
    code, notes = launched({"1:0": "die", "1:1": "die"}, size(spares=0, ranks_min=1))
    assert code == 128 + signal.SIGKILL
    assert "the ranks are ended: 0 processes are left, fewer than 1" in notes[-1]


def test_a_program_that_ends_before_it_calls_surviving_gives_its_code() -> None:
    code, notes = launched({}, size(), command="/bin/false")
    assert code == 1
    assert "processes end before they call surviving (exit code 1)" in notes[-1]


def test_a_command_that_is_missing_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launched({}, size(), command="/no/such/program")
    assert ended.value.code == 127


def test_a_job_shows_what_it_waits_for_and_ends_with_the_supervisor_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leading, "WAIT_ALONE_SECS", 0.1)
    monkeypatch.setattr(launcher, "LOOK_SECS", 0.1)
    notes: list[str] = []
    monkeypatch.setattr(os, "getppid", lambda: 1 if notes else 1000)
    began_secs = time.monotonic()
    code, _ = launched({"start": "wait"}, size(spares=0), notes=notes)
    assert code == 1
    assert notes == ["holdfast run: waiting for 2 processes to start"]
    assert time.monotonic() - began_secs < START_SECS / 2


def test_the_processes_end_with_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([1000])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    code, _ = launched({"1:0": "wait", "1:1": "wait"}, size())
    assert code == 1
