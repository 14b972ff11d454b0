"""Copies that trainers make of other hosts' parts: waited for, taken once, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from holdfast.format.names import CheckpointId
from holdfast.host.tiers import local_replicas as module
from holdfast.host.tiers.local_replicas import LocalReplicas
from tests.attempts import checkpoint_id

FIRST, SECOND = checkpoint_id(1), checkpoint_id(2)
MAKER, PART = 0, 3


def begun(
    copies: LocalReplicas, checkpoint: CheckpointId, held: Iterable[CheckpointId] = ()
) -> list:
    return copies.begin(MAKER, checkpoint, (PART,), set(held).__contains__)


def test_what_nobody_makes_is_not_waited_for() -> None:
    copies = LocalReplicas()
    begun(copies, FIRST)
    assert asyncio.run(copies.wait(FIRST, PART + 1)) is None
    assert asyncio.run(copies.wait(SECOND, PART)) is None


def test_a_copy_that_comes_before_the_order_is_taken_once() -> None:
    copies = LocalReplicas()
    begun(copies, FIRST)
    assert copies.end(FIRST, PART, "slot")
    assert asyncio.run(copies.wait(FIRST, PART)) == "slot"
    assert asyncio.run(copies.wait(FIRST, PART)) is None


def waited(copies: LocalReplicas, then) -> str | None:
    """What an order gets that waits already when `then` happens."""

    async def run() -> str | None:
        waiting = asyncio.create_task(copies.wait(FIRST, PART))
        await asyncio.sleep(0)
        then()
        return await asyncio.wait_for(waiting, 1.0)

    return asyncio.run(run())


def test_an_order_waits_until_the_copy_is_there() -> None:
    copies = LocalReplicas()
    begun(copies, FIRST)
    assert waited(copies, lambda: copies.end(FIRST, PART, "slot")) == "slot"


def test_an_order_is_told_where_the_copy_does_not_come_or_its_maker_is_gone() -> None:
    copies = LocalReplicas()
    for then in (
        lambda: copies.end(FIRST, PART, None),
        lambda: copies.forget_maker(MAKER),
        lambda: begun(copies, SECOND, {FIRST}),
        copies.clear,
    ):
        begun(copies, FIRST)
        assert waited(copies, then) is None
        copies.clear()


def test_a_copy_that_comes_too_late_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECS", 0.01)
    copies = LocalReplicas()
    begun(copies, FIRST)
    assert asyncio.run(copies.wait(FIRST, PART)) is None
    assert not copies.end(FIRST, PART, "slot")


def test_a_copy_that_no_order_came_for_is_given_back_once_its_checkpoint_is_gone() -> None:
    copies = LocalReplicas()
    begun(copies, FIRST)
    copies.end(FIRST, PART, "slot")
    assert begun(copies, SECOND, held={FIRST}) == []
    assert begun(copies, checkpoint_id(3), held={SECOND}) == [(FIRST, PART)]
    assert asyncio.run(copies.wait(FIRST, PART)) is None
