"""Which files in the working directory a program has written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.proving.written_files import changed, files_below


def test_files_of_runs_and_the_output_of_the_proof_are_not_the_program_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "events").mkdir()
    proof = tmp_path / "proof"
    proof.mkdir()
    before = files_below(proof)
    for path in ("weights.npy", "events/mine.log", "proof/output.log", "output.log"):
        (tmp_path / path).write_text("written")
    holdfast.save("run", {"w": np.ones(2)})
    Path("run/notes.txt").write_text("of the program")
    error_fd, output_fd = os.dup(2), os.open("output.log", os.O_WRONLY)
    try:
        os.dup2(output_fd, 2)
        after = files_below(proof)
    finally:
        os.dup2(error_fd, 2)
        os.close(error_fd)
        os.close(output_fd)
    assert changed(before, after) == ("events/mine.log", "run/notes.txt", "weights.npy")
