"""Processes forked from a stem run, end and fail as those that Python starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cli.command_line import await_line
from tests.hosts import Host, host

OPENED = """
import holdfast, signal, sys
manager = holdfast.CheckpointManager(sys.argv[1])
print("open", flush=True)
signal.pause()
"""
PROGRAM = """
import atexit, signal, sys, threading, time
atexit.register(lambda: print("left", flush=True))
import sibling
print(sys.argv[1:], sys.path[0], __name__, hash("text"), "numpy" in sys.modules, flush=True)
threading.Timer(0.01, lambda: print("awaited", flush=True)).start()
if "wait" in sys.argv:
    signal.pause()
if "raise" in sys.argv:
    raise ValueError("on purpose")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "sibling.py").touch()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return program


def output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    return process.communicate(timeout=240)


def test_a_program_ends_with_its_own_code_after_its_threads_and_its_exit_functions(
    script: Path,
) -> None:
    with host() as one:
        processes = [one.start(script, 3, "x", stem="numpy") for _ in range(2)]
        outputs = [output_of(process) for process in processes]
    lines = [out.splitlines() for out, _ in outputs]
    assert [process.returncode for process in processes] == [3, 3]
    assert [errors for _, errors in outputs] == ["", ""]
    for first, *rest in lines:
        assert first.startswith(f"['3', 'x'] {script.parent} __main__ ")
        assert first.endswith(" True")
        assert rest == ["awaited", "left"]
    assert lines[0][0] != lines[1][0], "two stems hash alike"


def test_an_error_is_on_stderr_and_a_signal_is_its_code(script: Path) -> None:
    with host() as one:
        failing = one.start(script, 0, "raise", stem="numpy")
        assert output_of(failing)[1].endswith("ValueError: on purpose\n")
        assert failing.returncode == 1
        waiting = one.start(script, 0, "wait", stem="numpy")
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("['0', 'wait']")
        assert waiting.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.01)
        waiting.send_signal(signal.SIGINT)
        assert output_of(waiting)[1].endswith("KeyboardInterrupt\n")
        killed = one.start(script, 0, "wait", stem="numpy")
        killed.kill()
        assert killed.wait(240) == killed.poll() == -signal.SIGKILL
        assert not Path(f"/proc/{killed.pid}").exists()


def test_a_variable_that_only_a_start_reads_needs_a_start(script: Path) -> None:
    assert "PYTHONWARNINGS" not in os.environ
    one = Host("host-a", script.parent, variables={"PYTHONWARNINGS": "error"})
    with pytest.raises(AssertionError, match="PYTHONWARNINGS"):
        one.start(script, 0, stem="numpy")


def test_an_agent_is_forked_from_a_stem_and_looks_as_one_that_is_started(tmp_path: Path) -> None:
    with host() as one:
        await_line(one.start("-c", OPENED, tmp_path / "forked", stem="numpy"), "open")
        (forked,) = one.agent_processes()
        # Below `holdfast run`, which adopts the agents of its processes, they are started.
        (tmp_path / "reports").mkdir()
        reports = {"HOLDFAST_SUPERVISED": str(tmp_path / "reports")}
        opened = one.start("-c", OPENED, tmp_path / "started", stem="numpy", **reports)
        await_line(opened, "open")
        (started,) = (agent for agent in one.agent_processes() if agent.pid != forked.pid)
        assert forked.cmdline()[-1].endswith("  ")
        assert started.cmdline()[-1].endswith("}")
        assert looks_of(forked) == looks_of(started)
        for agent in (forked, started):
            assert os.getsid(agent.pid) not in (agent.pid, os.getsid(0))
            assert json.loads(agent.cmdline()[3])["host"] == one.name


def test_an_agent_in_other_circumstances_than_the_stems_is_started(tmp_path: Path) -> None:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)){OPENED}"
    with host() as one:
        await_line(one.start("-c", limited, tmp_path / "run", stem="numpy"), "open")
        (started,) = one.agent_processes()
        assert started.cmdline()[-1].endswith("}")


def looks_of(agent: psutil.Process) -> list[object]:
    """What others see of an agent, and is the same for all agents of a host."""
    status = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    alike = {"Name", "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "Seccomp"}
    lines = [line for line in status if line.partition(":")[0] in alike]
    ends = [os.readlink(f"/proc/{agent.pid}/fd/{fd}") for fd in range(2)]
    limits = Path(f"/proc/{agent.pid}/limits").read_text()
    return [lines, ends, limits, agent.cmdline()[:3], agent.cwd(), agent.nice(), agent.exe()]
