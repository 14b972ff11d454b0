"""A full, closed or narrow output ends a command with one line, and never with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.main import main

COMMAND = (sys.executable, "-m", "holdfast")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the events of a training that has ended, by a copy of two lines of them."""
    path = tmp_path_factory.mktemp("output") / "run"
    holdfast.save(path, {"w": 1})
    (path / "events").mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_device_is_an_error_in_one_line(run: Path, options: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "report", str(run), *options], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    assert lines == ["error: write the output: No space left on device"]


def test_a_closed_output_is_an_error_in_one_line(run: Path) -> None:
    command = f'"$0" -m holdfast report "{run}" >&-'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    assert lines == ["error: write the output: Bad file descriptor"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_an_output_lacks_are_replaced(encoding: str) -> None:
    program = "from holdfast.cli.streams import prepare; prepare()\nprint('██ 5 · … → – ▁▂ é 日')\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    e = {"ascii": "?", "latin-1": "é"}[encoding]
    dot = {"ascii": "-", "latin-1": "·"}[encoding]
    assert done.stdout.decode(encoding) == f"## 5 {dot} ... -> - .. {e} ?\n"


def test_of_several_runs_those_are_reported_that_can_be(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), str(tmp_path / "nope")]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{run}: no events of a training yet")
    assert str(tmp_path / "nope") in err
