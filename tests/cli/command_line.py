"""Running `python -m holdfast …` on a test's own host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.host.wire.protocol import HeldStatus
from tests.hosts import Host, finished, stop, wait_until

TRAINER = Path(__file__).with_name("trainer.py")
SECS_MAX = 60.0

INTERRUPTIBLE = (
    "import runpy, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    "sys.argv[0] = 'holdfast'\n"
    "runpy.run_module('holdfast', run_name='__main__')\n"
)
"""Runs the command line so that SIGINT and SIGHUP count even where the tests run under `nohup`."""


def holdfast(
    host: Host, *arguments: object, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end; it ends with `code` (None: any), and never with a traceback."""
    process = host.start("-m", "holdfast", *arguments, stem="commands", COLUMNS="100")
    out, err = process.communicate(timeout=SECS_MAX)
    assert code in (None, process.returncode), f"{process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def answer(host: Host, *arguments: object, code: int | None = 0) -> dict:
    """The JSON document that a command prints."""
    return json.loads(holdfast(host, *arguments, "--json", code=code).stdout)


def train(host: Host, run: Path, **options: object) -> None:
    """Trains to the end."""
    finished(start_training(host, run, **options))


def start_training(host: Host, run: Path, **options: object) -> subprocess.Popen[str]:
    """Starts to train."""
    return host.start(TRAINER, run, json.dumps(options), stem="numpy")


def training(run: Path, **options: object) -> list[str]:
    """The command that trains."""
    return [sys.executable, str(TRAINER), str(run), json.dumps(options)]


def await_line(process: subprocess.Popen[str], start: str) -> str:
    """Reads the process's output up to a line that starts so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(f"no line {start!r}: {process.communicate()}")


def kill_all(host: Host, trainer: subprocess.Popen[str], step: int = 2) -> None:
    """Kills the trainer and its agent, once `step` is complete in RAM; no agent is started anew."""
    wait_until(lambda: any(held.step == step for held in _held(host)))
    agent = host.agent()
    (pid,) = [member.pid for member in agent.trainers]
    stop(pid)
    host.kill_agent()
    os.kill(pid, signal.SIGKILL)
    trainer.wait(timeout=SECS_MAX)


def _held(host: Host) -> list[HeldStatus]:
    return [
        held
        for agent in host.agents()
        for held in agent.held
        if held.parts_in_ram == held.part_count
    ]
