"""A clean environment with the wheel, as a user makes it, and programs that run in it."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dist.artifacts import CONSTRAINTS, NAME
from tests.dist.outcome import CheckFailedError, last_lines, run, succeed

NOT_TO_BE_HAD = re.compile(
    r"No matching distribution found for [^\n]*|Could not find a version that satisfies [^\n]*"
)


class UnavailableError(Exception):
    """The index has no package for this machine that an extra needs; the message names it."""


class CleanEnvironment:
    """A virtual environment in `folder`, outside of which its programs find no Holdfast."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._home = folder / "home"

    @property
    def python(self) -> Path:
        return self._folder / "bin" / "python"

    def install(self, wheel: Path, extra: str, constraints: str | None = None) -> None:
        """Make the environment anew and install the wheel with one extra, or with none.

        `constraints` replaces those of the repository.

        Raises:
            UnavailableError: the index lacks a package.
            CheckFailedError: anything else fails, such as versions that exclude each other.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        succeed([sys.executable, "-m", "venv", self._folder])
        self._home.mkdir()
        pins = CONSTRAINTS
        if constraints is not None:
            pins = self._folder / "constraints.txt"
            pins.write_text(constraints)
        target = f"{NAME}[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        done = run([self.python, "-m", "pip", "install", "-q", "-c", pins, target], self._home)
        if done.returncode != 0:
            missing = NOT_TO_BE_HAD.findall(done.stdout)
            # Versions that exclude each other are a defect of the extra, not of the index.
            if missing and "ResolutionImpossible" not in done.stdout:
                raise UnavailableError(missing[-1])
            raise CheckFailedError(f"pip to install {target}", last_lines(done.stdout))
        succeed([self.python, "-m", "pip", "check"], self._home)

    def run_program(self, program: str, is_expected_to_fail: bool = False) -> str:
        """Run a program in an empty folder with a host of its own; return what it printed."""
        with self._workplace() as (folder, variables):
            (folder / "program.py").write_text(program)
            command = [self.python, "program.py"]
            if not is_expected_to_fail:
                return succeed(command, folder, **variables)
            done = run(command, folder, **variables)
            if done.returncode == 0:
                raise CheckFailedError("the program to fail", last_lines(done.stdout))
            return done.stdout

    def run_twice(self, program: str) -> list[str]:
        """Run a program twice in one folder, and return the last line that each printed."""
        with self._workplace() as (folder, variables):
            (folder / "program.py").write_text(program)
            command = [self.python, "-W", "error", "program.py"]
            outputs = [succeed(command, folder, **variables) for _ in range(2)]
            succeed([self._folder / "bin" / "holdfast", "verify", "runs/gpt"], folder, **variables)
        return [output.rstrip("\n").rpartition("\n")[2] for output in outputs]

    def remove(self) -> None:
        """Remove it: the environments of all extras together are some ten GB."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _workplace(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """Yield an empty folder, and variables of a host whose agents end with the block."""
        shared = Path("/dev/shm")
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-dist-") as work,
            tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as ram,
        ):
            variables = {
                "HOLDFAST_HOST": "dist",
                "HOLDFAST_RAM": f"{ram}/ram",
                "HOLDFAST_STATE": f"{ram}/state",
            }
            try:
                yield Path(work), variables
            finally:
                command = self._folder / "bin" / "holdfast"
                run([command, "clean", "--all", "--yes"], Path(work), **variables)
