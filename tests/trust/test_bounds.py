"""Nothing waits without a bound: agents and trainers that are stopped.

A process under SIGSTOP is the worst peer there is: it lives, holds its locks, takes connections,
and never answers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.host.wire import protocol
from holdfast.host.wire.client import AgentClient
from holdfast.local_agent.client import PULSE_SECS, AgentGoneError
from tests.hosts import Host, await_events, events, host, wait_until
from tests.trust.in_process import in_process_host
from tests.trust.killing import agent_folder, end_well, locks_of, sealed, stopped, trainer

SILENT_SECS = 2 * PULSE_SECS
"""After this an agent that does not answer is taken for gone."""

STOPPED_SECS = 7.0
EASE_SECS = 15.0
"""What a loaded machine may add to a bound."""


@pytest.fixture
def one_host() -> Iterator[Host]:
    """A host of the test's own."""
    with host() as made:
        yield made


def command(one_host: Host, *arguments: object) -> subprocess.Popen[str]:
    """A `holdfast` command, started."""
    return one_host.start("-m", "holdfast", *arguments, stem="commands", COLUMNS="200")


@pytest.mark.soak
def test_training_goes_on_while_the_agent_stands_still(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with trainer(one_host, run, every=3, sleep=0.01) as living:
        wait_until(lambda: sealed(run) > 0)
        with stopped(one_host.agent().pid):
            time.sleep(STOPPED_SECS / 2)
            before = living.said("step")[-1]["step"]
            time.sleep(STOPPED_SECS / 2)
            during = [line for line in living.said("step") if line["step"] > before]
        # Each step takes some 10 ms; a due one is dropped instead of waiting for the agent.
        assert len(during) > 20, during
        assert not any(line["saved"] for line in during)
        newest = living.said("step")[-1]["step"]
        wait_until(lambda: sealed(run) > newest)
        assert not living.said("failed")


@pytest.mark.soak
def test_a_trainer_that_stands_still_in_the_middle_of_a_fill_is_fenced(
    one_host: Host, tmp_path: Path
) -> None:
    run, options = tmp_path / "run", {"kilobytes": 100_000}
    with trainer(one_host, run, every=1, **options) as first:
        wait_until(lambda: sealed(run) > 0)
        slots = agent_folder(one_host) / "ram" / "slots"
        # A slot that is being filled is locked; stopped in that moment it stays so.
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, "no fill was met"
            if locks_of(first.process.pid, slots):
                os.kill(first.process.pid, signal.SIGSTOP)
                if locks_of(first.process.pid, slots):
                    break
                os.kill(first.process.pid, signal.SIGCONT)
        floor = sealed(run)
        with trainer(one_host, run, every=1, takeover=True, **options) as second:
            line = second.await_line("start")
            assert line["start"] > floor
            assert line["right"]
            wait_until(lambda: max(_steps_of(run, "committed", 2), default=-1) > floor)
            os.kill(first.process.pid, signal.SIGCONT)
            assert first.process.wait(240) == 1
            first.kill()
            assert "FencedError" in first.told()
            newest = max(_steps_of(run, "committed", 2))
            wait_until(lambda: max(_steps_of(run, "committed", 2)) > newest)
        started = await_events(run, "attempt_started", count=2)[1]["time"]
        late = [e for e in events(run, "sealed", "committed") if e["attempt"] == 1]
        assert all(e["time"] < started or e["step"] < line["start"] for e in late)
    end_well(one_host, run, **options)


def _steps_of(run: Path, event: str, attempt: int) -> list[int]:
    return [e["step"] for e in events(run, event) if e["attempt"] == attempt]


COMMANDS = {
    "status": (["status"], 0),
    "ls": (["ls"], 0),
    "save": (["save"], 1),
    "stop": (["stop", "--timeout", "1"], 1),
}


@pytest.mark.soak
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["status", "ls"], id="that look"),
        pytest.param(["save", "stop"], id="that ask"),
    ],
)
def test_commands_end_also_where_the_agent_stands_still(
    one_host: Host, tmp_path: Path, names: list[str]
) -> None:
    run = tmp_path / "run"
    with trainer(one_host, run, sleep=0.01) as living:
        wait_until(lambda: bool(events(run, "committed")))
        folder, agent = agent_folder(one_host), one_host.agent().pid
        with stopped(agent), stopped(living.process.pid):
            started = time.monotonic()
            asked = {name: command(one_host, *COMMANDS[name][0], run) for name in names}
            ends = {name: one.communicate(timeout=240) for name, one in asked.items()}
            assert time.monotonic() - started < SILENT_SECS + EASE_SECS
        codes = {name: one.returncode for name, one in asked.items()}
        assert codes == {name: COMMANDS[name][1] for name in names}, ends
    if "status" in ends:
        assert f"{folder}: its agent's process is alive but does not answer" in ends["status"][1]
        assert "no agent" not in ends["status"][0]
        assert "committed" in ends["ls"][0]
    else:
        assert f"process {agent}" in ends["save"][1]
        assert f"kill -CONT {agent}" in ends["save"][1]
        assert f"kill -CONT {agent}" in ends["stop"][1]


def test_a_peer_that_takes_connections_and_never_answers_is_given_up(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as one:
        one.start_agent()
        client = AgentClient(one.folder, timeout_secs=0.5)
        # The agent's loop does not run here, so that it accepts nothing.
        with pytest.raises(AgentGoneError):
            client.call("status", protocol.Empty(), protocol.AgentStatus)
        client.close()
