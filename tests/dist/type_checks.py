"""Check the wheel's types from outside, with the type checker of a user."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.dist.environment import CleanEnvironment
from tests.dist.outcome import expect, run, succeed

PROGRAMS = Path(__file__).parent
EXPECTED = re.compile(r"# expect: ([a-z-]+)$")
ERROR = re.compile(r"^\w+\.py:(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


def check_types(environment: CleanEnvironment) -> str:
    """Check a program that mypy accepts under `--strict`, and one with a mistake in some lines."""
    with tempfile.TemporaryDirectory(prefix="holdfast-dist-") as work:
        folder = Path(work)
        for name in ("typed_program.py", "mistyped_program.py"):
            shutil.copy(PROGRAMS / name, folder)
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", work, "--no-pretty"]
        command += ["--python-executable", str(environment.python)]
        succeed([*command, "typed_program.py"], folder)
        output = run([*command, "mistyped_program.py"], folder).stdout
        lines = (folder / "mistyped_program.py").read_text().splitlines()
    marks = [(number, EXPECTED.search(line)) for number, line in enumerate(lines, 1)]
    mistakes = {(str(number), mark[1]) for number, mark in marks if mark}
    expect(mistakes, set(ERROR.findall(output)), "refused lines and their codes")
    return f"mypy --strict accepts a right program and refuses {len(mistakes)} wrong lines"
