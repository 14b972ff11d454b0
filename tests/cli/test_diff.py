"""`holdfast diff`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.interop.safetensors_export import export_safetensors


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
    assert main(["diff", f"{runs}/a", f"{runs}/a@x"]) == 2
    assert "expected RUN@STEP with a step's number, found 'x'" in capsys.readouterr().err
    assert main(["diff", "--json", f"{runs}/a", f"{runs}/c"]) == 2
    captured = capsys.readouterr()
    assert "expected an array or a value that both have, found 'w' in A and 'other' in B" in (
        captured.err
    )
    assert "--prefix" not in captured.err
    assert json.loads(captured.out)["error"] == "StructureMismatchError"


def test_damaged_bytes_are_found_where_the_digests_are_equal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holdfast.save(runs / "same", {"w": np.full(4, 1.0), "lr": 1.0, "same": 1})
    assert main(["diff", f"{runs}/a", f"{runs}/same"]) == 0
    (image,) = (runs / "same").rglob("image-*")
    content = bytearray(image.read_bytes())
    content[-1] ^= 1
    image.write_bytes(content)
    for pair in (("a", "same"), ("same", "a")):
        assert main(["diff", *(f"{runs}/{name}" for name in pair)]) == 2
        error = capsys.readouterr().err
        assert f"`holdfast verify {runs}/same 0` lists the bad bytes" in error


def test_a_prefix_that_fits_no_name_is_named(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holdfast.save(runs / "nested", {"model": {"w": np.zeros(4)}})
    (file,) = export_safetensors(runs / "nested", 0, runs / "hf", prefix="model")
    assert main(["diff", f"{runs}/nested", str(file)]) == 2
    assert "with --prefix '': of a run what is below it is compared" in capsys.readouterr().err
    assert main(["diff", "--prefix", "model", f"{runs}/nested", str(file)]) == 0


def test_files_of_pytorch_are_named_by_what_is_done_with_them(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "bad.pt").write_bytes(b"nothing of PyTorch")
    assert main(["diff", f"{runs}/a", f"{runs}/bad.pt"]) == 2
    assert f"error: compare {runs}/bad.pt: expected a file of torch.save" in capsys.readouterr().err


def test_two_runs_are_compared_at_the_newest_step_of_both(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, steps in {"one": (1, 2, 3), "two": (1, 2), "three": (7,)}.items():
        with holdfast.CheckpointManager(runs / name, ram=None, framework="numpy") as manager:
            for step in steps:
                manager.save(step, {"w": np.full(4, step)}, force=True)
    for other, label, code in (
        ("two", "2", 0),
        ("one", "3", 0),
        ("one@1", "1", 1),
        ("three", "7", 1),
    ):
        assert main(["diff", f"{runs}/one", f"{runs}/{other}"]) == code
        first = "2" if other == "two" else "3"
        place = f"{runs}/{other.partition('@')[0]}@{label}"
        assert f"{runs}/one@{first} is A, {place} is B\n" in capsys.readouterr().err
