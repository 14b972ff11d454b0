"""A job of `holdfast run --standby` in a test."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cli.command_line import await_line
from tests.hosts import Host

PROGRAM = Path(__file__).with_name("standby_program.py")
OWN = """
import os, random
PID, TEXT, FLAG = os.getpid(), "first", os.environ.get("STANDBY_FLAG")
SEEDED = random.Random(1).random()
"""


class Job:
    """A program under `holdfast run`. `errors` are the lines that it has written so far."""

    def __init__(self, host: Host, folder: Path, *command: object) -> None:
        self.folder = folder
        (folder / "own").mkdir(exist_ok=True)
        if not self.own.exists():
            self.own.write_text(OWN)
        self.errors: list[str] = []
        arguments = ["run", "--standby", "--max-restarts", "3", *map(str, command)]
        cache = str(folder / "cache")
        self.process = host.start(
            *("-m", "holdfast", *arguments), stem="commands", XDG_CACHE_HOME=cache
        )

    @property
    def own(self) -> Path:
        """The program's own module."""
        return self.folder / "own" / "standby_own.py"

    def seen(self) -> dict:
        """What the next attempt prints."""
        return json.loads(await_line(self.process, "{"))

    def await_error(self, text: str) -> str:
        """Reads its errors up to a line with this text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line {text!r}: {self.errors}")

    def await_ready(self) -> str:
        """Waits for the standby process."""
        return self.await_error("modules imported")

    def end(self, attempt: int, how: str = "kill") -> None:
        """Ends an attempt: `kill`, or its exit code."""
        unfinished = self.folder / "end"
        unfinished.write_text(how)
        unfinished.rename(self.folder / f"end-{attempt}")

    def await_end(self) -> int:
        """Waits for the end of `holdfast run`, and returns its exit code."""
        try:
            _, err = self.process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.errors += err.splitlines(keepends=True)
        return self.process.returncode
