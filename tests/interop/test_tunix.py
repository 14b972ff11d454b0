"""Tunix's own trainer on Holdfast: killed, and continued bit for bit."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from pathlib import Path

import pytest

import holdfast
from tests.hosts import Host
from tests.interop.trainer_sources import ended, run_program

MISSING = [name for name in ("tunix", "orbax", "flax") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} cannot be had here"),
]


def train(host: Host, directory: Path, kind: str, step: int) -> subprocess.CompletedProcess[str]:
    return run_program(host, "tunix_training", directory, kind, step)


def test_a_killed_training_ends_with_the_same_bits(one_host: Host, tmp_path: Path) -> None:
    first, last, expected = ended(train(one_host, tmp_path / "orbax", "orbax", -1))
    assert (first, last) == ("0", "12")
    killed = train(one_host, tmp_path / "run", "holdfast", 8)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    again = train(one_host, tmp_path / "run", "holdfast", -1)
    assert ended(again) == ["6", "12", expected]
    with holdfast.open_run(tmp_path / "run" / "holdfast") as run:
        assert run.latest_step() == 12
        assert run.metadata(12).attempt == 2
