"""How the saves of two runs compare: a function of what is on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.proving.verdict import SavedRun, judge


def saved(directory: Path, metrics: dict[str, float] | None) -> SavedRun:
    """A run with the checkpoint of step 0."""
    holdfast.save(directory, {"w": np.ones(3)}, metrics=metrics)
    return SavedRun(directory=str(directory), steps=(0,), saves={})


@pytest.mark.parametrize("metrics", [None, {"accuracy": 0.5}])
def test_a_metric_that_one_run_lacks_is_named_and_is_no_difference(
    tmp_path: Path, metrics: dict[str, float] | None
) -> None:
    a = saved(tmp_path / "a", {"loss": 1.0} | (metrics or {}))
    for pair in ((a, saved(tmp_path / "b", metrics)), (saved(tmp_path / "c", metrics), a)):
        verdict = judge(*pair)
        assert verdict.is_equal
        assert verdict.left_out == ("metric loss: one of the two runs saved step 0 without it",)
        assert verdict.document["metrics"] == len(metrics or {})


def test_a_metric_that_both_runs_have_is_compared(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / str(loss), {"loss": loss}) for loss in (1.0, 2.0))
    assert not judge(a, b).is_equal
