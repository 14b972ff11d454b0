"""Whatever a user's policy raises on its thread is reported, and the thread goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError
from holdfast.host.wire.protocol import Judged, Notice
from holdfast.trainer.save.user_policies import UserPolicies, UserPolicyThread
from tests.attempts import checkpoint_id
from tests.hosts import wait_until


class UnprintableError(Exception):
    """An error whose own text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


RAISED = [
    RuntimeError("my own mistake"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    UnprintableError(),
]


@dataclass
class Session:
    """The calls to the agent, which are answered by nothing."""

    calls: list[Any] = field(default_factory=list)

    def call(self, name: str, message: Any, answer: Any) -> None:
        self.calls.append(message)


@dataclass
class Failing:
    """Both kinds of policies, which raise an error the first times they are asked."""

    error: BaseException
    left: int = 1

    def should_save(self, step: int, previous_steps: Sequence[Any], *, context: Any) -> bool:
        self._fail()
        return True

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        self._fail()
        return [checkpoint.step == 1 for checkpoint in checkpoints]

    def _fail(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise self.error


@dataclass
class Rig:
    session: Session = field(default_factory=Session)
    errors: list[HoldfastError] = field(default_factory=list)
    step: int = 0

    @contextmanager
    def thread(self, policies: UserPolicies) -> Iterator[UserPolicyThread]:
        thread = UserPolicyThread(
            policies,
            self.session,
            SystemClock(),
            lambda: self.step,
            lambda: (False, False),
            self.errors.append,
        )
        try:
            yield thread
        finally:
            thread.close()


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_a_save_policy_raises_is_reported_and_it_is_asked_again(error: BaseException) -> None:
    rig = Rig()
    with rig.thread(UserPolicies(durable=Failing(error), ram=None, preservation=None)):
        rig.step = 1
        wait_until(lambda: rig.errors)
        assert type(error).__name__ in str(rig.errors[0])
        rig.step = 2
        wait_until(lambda: rig.session.calls)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_a_preservation_policy_raises_keeps_all_and_it_is_asked_again(
    error: BaseException,
) -> None:
    rig = Rig()
    time = datetime(2026, 1, 1, tzinfo=UTC).isoformat()
    ids = tuple(checkpoint_id(step, 1) for step in (1, 2, 3))
    data = [{"id": msgspec.to_builtins(id), "time": time, "metrics": None} for id in ids]
    with rig.thread(UserPolicies(durable=None, ram=None, preservation=Failing(error))) as thread:
        for count in (1, 2):
            thread.on_notice(Notice(kind="judge", id=ids[2], data=data))
            wait_until(lambda count=count: len(rig.session.calls) == count)
    assert type(error).__name__ in str(rig.errors[0])
    assert rig.session.calls == [
        Judged(newest=ids[2], keep=ids),
        Judged(newest=ids[2], keep=(ids[0], ids[2])),
    ]
