"""What became of saves, and how failures are reported."""

from __future__ import annotations

import pytest

from holdfast.errors import FencedError, SaveFailedError
from holdfast.format.names import CheckpointId
from holdfast.manager.progress import Progress


def test_all_saves_that_failed_are_reported_together_and_once() -> None:
    progress = Progress()
    for step in (7, 3, 5):
        progress.accept(CheckpointId(step, 1), durable=True)
        progress.fail(CheckpointId(step, 1), f"reason {step}")
    with pytest.raises(SaveFailedError, match=r"steps 3, 5, 7.*reason 3.*reason 7") as raised:
        progress.raise_failure()
    assert (raised.value.step, raised.value.steps) == (3, (3, 5, 7))
    assert not progress.has_failed
    progress.raise_failure()


def test_one_save_that_failed_has_one_step() -> None:
    progress = Progress()
    progress.accept(CheckpointId(7, 1), durable=True)
    progress.fail(CheckpointId(7, 1), "no room")
    with pytest.raises(SaveFailedError, match=r"save step 7: .*no room") as raised:
        progress.raise_failure()
    assert raised.value.steps == (7,)


def test_an_error_of_another_kind_is_reported_besides_failed_saves() -> None:
    progress = Progress()
    progress.accept(CheckpointId(7, 1), durable=True)
    progress.fail(CheckpointId(7, 1), "no room")
    progress.stop(FencedError("taken over"))
    with pytest.raises(SaveFailedError):
        progress.raise_failure()
    with pytest.raises(FencedError):
        progress.raise_failure()
    assert not progress.has_failed


def test_a_wait_that_runs_out_says_so() -> None:
    progress = Progress()
    assert progress.wait_finished(None)
    progress.accept(CheckpointId(7, 1), durable=True)
    assert not progress.wait_finished(0)
    assert not progress.wait_finished(0.01)
