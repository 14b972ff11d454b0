"""What a check of the distribution found, and the commands that it runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND_SECS = 1800.0
LINES_SHOWN = 12
CHARS_SHOWN = 600


class CheckFailedError(Exception):
    """A check found something else than it expects."""

    def __init__(self, expected: object, found: object) -> None:
        super().__init__(f"expected {expected}\nfound {found}")


def expect(expected: object, found: object, name: str = "") -> None:
    """Raise unless both are equal; `name` says what they are."""
    if expected != found:
        prefix = f"{name}: " if name else ""
        shown = repr(found)[:CHARS_SHOWN]
        raise CheckFailedError(f"{prefix}{expected!r}"[:CHARS_SHOWN], shown)


def run(
    arguments: Sequence[str | Path], folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; stdout and stderr are both in `stdout`."""
    return subprocess.run(
        [str(argument) for argument in arguments],
        cwd=folder,
        env=_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECS,
    )


def succeed(arguments: Sequence[str | Path], folder: Path = ROOT, **variables: str) -> str:
    """Run a command that is expected to exit with 0, and return what it printed."""
    done = run(arguments, folder, **variables)
    if done.returncode != 0:
        command = " ".join(Path(arguments[0]).parts[-1:] + tuple(map(str, arguments[1:])))
        found = f"exit code {done.returncode} and\n{last_lines(done.stdout)}"
        raise CheckFailedError(f"`{command}` to succeed", found)
    return done.stdout


def last_lines(text: str) -> str:
    """Return the end of what a command printed, without pip's warnings."""
    lines = [line for line in text.splitlines() if line and not line.startswith("WARNING: ")]
    return "\n".join(lines[-LINES_SHOWN:])


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for programs of users, in which nothing leads to the repository."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**own, "NO_COLOR": "1", **variables}
