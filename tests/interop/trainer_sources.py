"""Programs that use the trainers of other projects, and the sources of those trainers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Host

ROOT = Path(__file__).parents[2]


def run_program(
    host: Host, module: str, *arguments: object, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a module of this folder as a program, on CPUs."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.interop.{module}", *map(str, arguments)],
        env=host.environment | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "JAX_PLATFORMS": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def ended(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what a program that ended well printed at its end."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ENDED")]
    return line.split()[1:]


def source_or_skip(variable: str, contains: str, packages: tuple[str, ...]) -> Path:
    """Return the folder; skip the module that is being collected, with the reason, without it."""
    named = os.environ.get(variable, "")
    if not named:
        reason = f"{variable} is not set to a folder of the trainer's source"
        pytest.skip(reason, allow_module_level=True)
    folder = Path(named).absolute()
    assert (folder / contains).exists(), f"{variable}={named}: it does not contain {contains}"
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be imported here", allow_module_level=True)
    return folder
