"""Keras's `OrbaxCheckpoint` on Holdfast: killed between epochs, and continued bit for bit."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from pathlib import Path

import pytest

import holdfast
from tests.hosts import Host
from tests.interop.trainer_sources import ROOT, ended, run_program

MISSING = [name for name in ("keras", "orbax", "jax") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} cannot be had here"),
]


def train(
    host: Host, directory: Path | str, epoch: int, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return run_program(host, "keras_training", directory, epoch, folder=folder)


def test_a_killed_training_ends_with_the_same_bits(one_host: Host, tmp_path: Path) -> None:
    _, expected = ended(train(one_host, "-", -1))
    killed = train(one_host, tmp_path / "run", 3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert ended(train(one_host, tmp_path / "run", -1)) == ["4", expected]


def test_the_example_of_the_page_goes_on_where_it_was(one_host: Host, tmp_path: Path) -> None:
    assert ended(train(one_host, "page", -1, tmp_path)) == ["1"]
    assert ended(train(one_host, "page", -1, tmp_path)) == ["2"]
    with holdfast.open_run(tmp_path / "runs" / "keras" / "holdfast") as run:
        assert run.all_steps()
