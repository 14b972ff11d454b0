"""`holdfast diff`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, value in {"a": 1.0, "b": 1.5}.items():
        holdfast.save(tmp_path / name, {"w": np.full(4, value), "lr": value, "same": 1})
    holdfast.save(tmp_path / "c", {"other": np.zeros(2)})
    return tmp_path


def test_equal_checkpoints_are_0(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", f"{runs}/a", f"{runs}/a@0"]) == 0
    assert capsys.readouterr().out == ("equal: 1 array (32 B), 2 values and 0 metrics compared\n")


def test_only_what_differs_is_listed_and_the_code_is_1(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", f"{runs}/a", f"{runs}/b"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "w: 4 of 4 elements differ, by at most 0.5 (float64 (4,))",
        "lr: 1.0 | 1.5",
        "different: 1 array (32 B), 2 values and 0 metrics compared",
    ]
    assert main(["diff", "--json", f"{runs}/a", f"{runs}/b"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], [d["name"] for d in document["differences"]]) == (False, ["w", "lr"])


def test_what_cannot_be_compared_is_2(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", f"{runs}/a", f"{runs}/nothing"]) == 2
    assert "found nothing there" in capsys.readouterr().err
    assert main(["diff", "--json", f"{runs}/a", f"{runs}/c"]) == 2
    captured = capsys.readouterr()
    assert "expected an array or a value that both have" in captured.err
    assert json.loads(captured.out)["error"] == "StructureMismatchError"
