"""Ctrl-C while a command starts: no traceback, and the exit code of an interrupted command."""

from __future__ import annotations

import signal
import subprocess
import sys

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
