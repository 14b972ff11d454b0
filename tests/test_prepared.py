"""Processes forked from a stem run, end and fail as those that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.hosts import Host, host

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
    return process.communicate(timeout=60)


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
        assert killed.wait(60) == killed.poll() == -signal.SIGKILL
        assert not Path(f"/proc/{killed.pid}").exists()


def test_a_variable_that_only_a_start_reads_needs_a_start(script: Path) -> None:
    assert "PYTHONWARNINGS" not in os.environ
    one = Host("host-a", script.parent, variables={"PYTHONWARNINGS": "error"})
    with pytest.raises(AssertionError, match="PYTHONWARNINGS"):
        one.start(script, 0, stem="numpy")
