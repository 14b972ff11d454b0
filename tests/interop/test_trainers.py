"""Trainers of other projects: killed in the middle of an epoch, and continued bit for bit."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.hosts import Host

ROOT = Path(__file__).parents[2]
TRAINERS = {
    "accelerate": ("accelerate", "torchdata"),
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning", "torchdata"),
    "torchtitan": ("torchtitan", "torchdata"),
}


def _marks(projects: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    missing = [name for name in projects if importlib.util.find_spec(name) is None]
    return [pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} cannot be had here")]


def run(name: str, one_host: Host, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"tests.interop.{name}_training", *map(str, arguments)],
        env=one_host.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def ended(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ENDED")]
    return line.split()[1:]


@pytest.mark.soak
@pytest.mark.parametrize("name", [pytest.param(n, marks=_marks(p)) for n, p in TRAINERS.items()])
def test_a_killed_training_ends_with_the_same_bits(
    name: str, one_host: Host, tmp_path: Path
) -> None:
    directory, output = tmp_path / "checkpoint", tmp_path / "output"
    expected = ended(run(name, one_host, "-", output, -1))
    killed = run(name, one_host, directory, output, 14)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert ended(run(name, one_host, directory, output, -1)) == expected
    with holdfast.open_run(directory) as saved:
        assert saved.latest_step() == int(expected[0])
        assert saved.metadata(int(expected[0])).attempt == 2
