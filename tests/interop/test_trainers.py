"""Trainers of other projects: killed in the middle of an epoch, and continued bit for bit."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from pathlib import Path

import pytest

import holdfast
from tests.hosts import Host
from tests.interop.trainer_sources import ended, run_program

TRAINERS = {
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning", "torchdata"),
    "torchtitan": ("torchtitan", "torchdata"),
}


def _marks(projects: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    missing = [name for name in projects if importlib.util.find_spec(name) is None]
    return [pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} cannot be had here")]


def run(name: str, one_host: Host, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_program(one_host, f"{name}_training", *arguments)


@pytest.mark.soak
@pytest.mark.timeout(400)
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


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [pytest.param("lightning_io", marks=_marks(("lightning",)))])
def test_a_killed_training_continues_from_the_trainers_own_checkpoints(
    name: str, one_host: Host, tmp_path: Path
) -> None:
    directory, output = tmp_path / "checkpoints", tmp_path / "output"
    expected = ended(run(name, one_host, "-", output, -1))
    killed = run(name, one_host, directory, output, 14)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["epoch=0-step=9.ckpt", "epoch=1-step=12.ckpt"]
    assert ended(run(name, one_host, directory, output, -1)) == expected
