"""Ctrl-C in a command: no traceback, and the exit code of an interrupted command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Ctrl-C at the first import below `holdfast.cli`, as pressed while the command is starting.
INTERRUPTED_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("holdfast.cli."):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from holdfast.__main__ import main
sys.exit(main())
"""


def test_a_command_that_is_interrupted_while_it_starts_prints_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, "ls"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "interrupted\n")


# A command that calls a library, whose code stands where Ctrl-C is pressed.
IN_A_LIBRARY = """
import signal, sys, threading, time, types

class PressesInCallback:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def dropped(*_):
    PressesInCallback()
    time.sleep(60)

def dropped_and_done(*_):
    PressesInCallback()

def other_error(*_):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        threading.Thread(target=lambda: 1 / 0).start()
        raise RuntimeError("closed") from error

def twice(*_):
    while True:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass

sys.modules["holdfast.interop.torch_files"] = types.SimpleNamespace(
    import_torch=globals()[sys.argv.pop(1)]
)
from holdfast.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("where", ["dropped", "dropped_and_done", "other_error", "twice"])
def test_an_interruption_that_a_library_swallows_ends_an_import(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", IN_A_LIBRARY, where, "import", tmp_path / "file", tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("wrote ")]
    assert (done.returncode, lines) == (128 + signal.SIGINT, ["interrupted"])
