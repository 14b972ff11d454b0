"""The order in which the saver's thread gets the saves and the skipped steps of its rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.clock import SystemClock
from holdfast.trainer.save.save_queue import SaveQueue
from tests.attempts import checkpoint_id


def request_of(step: int) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(id=checkpoint_id(step)), is_handed_over=False)


def reported(queue: SaveQueue) -> list[str]:
    """What the saver's thread reports, in its order."""
    work = queue.take()
    skips = [f"skip {checkpoint.step}" for checkpoint in work.skipped]
    return skips if work.request is None else [*skips, f"save {work.request.plan.id.step}"]


@pytest.fixture
def queue() -> SaveQueue:
    return SaveQueue(SystemClock())


def test_a_step_that_is_skipped_while_an_earlier_save_waits_is_reported_after_it(
    queue: SaveQueue,
) -> None:
    queue.skip(checkpoint_id(24))
    queue.put(request_of(27))
    queue.skip(checkpoint_id(30))
    queue.skip(checkpoint_id(33))
    assert reported(queue) == ["skip 24", "save 27"]
    assert reported(queue) == ["skip 30", "skip 33"]


def test_skipped_steps_are_reported_before_the_save_after_them(queue: SaveQueue) -> None:
    queue.put(request_of(27))
    queue.skip(checkpoint_id(30))
    assert reported(queue) == ["save 27"]
    queue.put(request_of(33))
    assert reported(queue) == ["skip 30", "save 33"]


def test_a_step_of_a_later_attempt_is_after_all_of_an_earlier_one(queue: SaveQueue) -> None:
    queue.put(request_of(27))
    queue.skip(checkpoint_id(3, 2))
    assert reported(queue) == ["save 27"]
    assert reported(queue) == ["skip 3"]


def test_what_was_skipped_is_reported_although_the_queue_is_closed(queue: SaveQueue) -> None:
    queue.put(request_of(27))
    queue.skip(checkpoint_id(30))
    queue.is_closed = True
    assert reported(queue) == ["save 27"]
    work = queue.take()
    assert [checkpoint.step for checkpoint in work.skipped] == [30]
    assert work.is_closed
