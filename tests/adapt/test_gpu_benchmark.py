"""`benchmarks/gpu.py` without a GPU: it reports that, and its code path works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Host

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_without_a_gpu_it_says_that_nothing_was_measured() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith("NOTHING WAS MEASURED: ")


@pytest.mark.soak
def test_on_a_stand_in_holdfast_works_and_the_rest_is_listed_as_not_run(
    one_host: Host, tmp_path: Path
) -> None:
    report = tmp_path / "gpu.json"
    folders = ["--ram", str(one_host.folder), "--directory", str(tmp_path)]
    options = ["--stand-in", "--rounds", "2", "--steps", "4", "--json", str(report)]
    done = run(*options, *folders, PYTHONPATH=str(SCRIPT.parents[1]))
    assert done.returncode == 3, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert set(found["not_run"]) == {"pinned", "orbax", "torch", "dcp"}
    assert done.stdout.count("NOT RUN: ") == 4
    assert "A STAND-IN DEVICE" in done.stdout
    for section in ("holdfast", "holdfast-torch"):
        figures = found["found"][section]
        assert figures["restored_is_the_same"] is True
        assert figures["saves"] == 2
        assert figures["copied_bytes_per_sec"] > 0, "the stand-in device copied nothing"
        assert not figures["warnings"]
    # Nothing is left behind: neither folders nor agents.
    assert not list(one_host.folder.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    assert one_host.agents() == []


@pytest.mark.parametrize("section", ["holdfast", "orbax"])
def test_a_section_about_a_gpu_does_not_run_on_something_else(section: str, tmp_path: Path) -> None:
    report = tmp_path / "section.json"
    done = run(
        "--section", section, "--size-gb", "0.01", "--json", str(report), JAX_PLATFORMS="cpu"
    )
    assert done.returncode == 0, done.stderr
    assert "JAX sees no GPU" in json.loads(report.read_text())["not_run"]


def test_a_size_that_has_no_room_is_told_and_not_tried(tmp_path: Path) -> None:
    report = tmp_path / "section.json"
    done = run("--stand-in", "--section", "holdfast", "--size-gb", "1e6", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "needs 2050000.0 GB for two slots" in json.loads(report.read_text())["not_run"]
