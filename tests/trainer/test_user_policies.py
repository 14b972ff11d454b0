"""Whatever a user's policy raises on its thread is reported, and the thread goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError, WaitTimeoutError
from holdfast.host.wire.protocol import Judged, Notice
from holdfast.policy.contexts import SaveContext
from holdfast.policy.save_decision_policy import AnySavePolicy
from holdfast.trainer.save import user_policies
from holdfast.trainer.save.user_policies import UserPolicies, UserPolicyThread
from tests.attempts import checkpoint_id
from tests.hosts import Host, wait_until


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
    """The calls to the agent, which are answered by nothing or by an error."""

    calls: list[Any] = field(default_factory=list)
    error: HoldfastError | None = None

    def call(self, name: str, message: Any, answer: Any) -> None:
        self.calls.append(message)
        if self.error is not None:
            raise self.error


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

    def publish(self, step: int, thread: UserPolicyThread) -> None:
        self.step = step
        thread.note_step()

    @contextmanager
    def thread(
        self, policies: UserPolicies, published: Callable[[], int] | None = None
    ) -> Iterator[UserPolicyThread]:
        thread = UserPolicyThread(
            policies,
            self.session,
            SystemClock(),
            published or (lambda: self.step),
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
    with rig.thread(UserPolicies(durable=Failing(error), ram=None, preservation=None)) as thread:
        rig.publish(1, thread)
        wait_until(lambda: rig.errors)
        assert type(error).__name__ in str(rig.errors[0])
        rig.publish(2, thread)
        wait_until(lambda: rig.session.calls)


def test_hosts_that_do_not_agree_in_time_on_a_step_that_a_policy_selects_end_no_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = WaitTimeoutError("save: the hosts did not agree")
    rig, always = Rig(Session(error=late)), Failing(RuntimeError(), left=0)
    with rig.thread(UserPolicies(durable=always, ram=None, preservation=None)) as thread:
        for count in (1, 2):
            rig.publish(count, thread)
            wait_until(lambda count=count: len(rig.session.calls) == count)
    assert not rig.errors
    assert [record.getMessage() for record in caplog.records] == [str(late)]


def test_a_policy_that_raises_at_every_step_is_named_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    policy = Failing(RuntimeError("my own mistake"), left=3)
    with rig.thread(UserPolicies(durable=policy, ram=None, preservation=None)) as thread:
        for step in (1, 2, 3):
            rig.publish(step, thread)
            wait_until(lambda step=step: len(rig.errors) == step)
    message = (
        "evaluate the user's policies: Failing.should_save raised RuntimeError: my own mistake"
    )
    assert [str(error) for error in rig.errors] == [message] * 3
    (record,) = [each for each in caplog.records if "my own mistake" in each.getMessage()]
    assert record.getMessage() == message
    assert record.exc_info is not None


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_a_preservation_policy_raises_keeps_all_and_it_is_asked_again(
    error: BaseException,
) -> None:
    rig = Rig()
    made_at = datetime(2026, 1, 1, tzinfo=UTC).isoformat()
    ids = tuple(checkpoint_id(step, 1) for step in (1, 2, 3))
    data = [{"id": msgspec.to_builtins(id), "time": made_at, "metrics": None} for id in ids]
    with rig.thread(UserPolicies(durable=None, ram=None, preservation=Failing(error))) as thread:
        for count in (1, 2):
            thread.on_notice(Notice(kind="judge", id=ids[2], data=data))
            wait_until(lambda count=count: len(rig.session.calls) == count)
    assert type(error).__name__ in str(rig.errors[0])
    assert rig.session.calls == [
        Judged(newest=ids[2], keep=ids),
        Judged(newest=ids[2], keep=(ids[0], ids[2])),
    ]


@dataclass
class Hanging:
    """Policies that return once `go_on` is set."""

    go_on: threading.Event = field(default_factory=threading.Event)
    steps: list[int] = field(default_factory=list)

    def should_save(self, step: int, previous_steps: Sequence[Any], *, context: Any) -> bool:
        self.steps.append(step)
        return self.go_on.wait(240)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        self.go_on.wait(240)
        return [True] * len(checkpoints)


@dataclass
class Waiting(Hanging):
    """Another class of such policies."""


def test_a_policy_that_does_not_return_is_named_once_at_a_later_step_and_again_by_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_policies, "LATE_SECS", 0.0)
    monkeypatch.setattr(user_policies, "CLOSE_SECS", 0.01)
    rig, policy = Rig(), Hanging()
    both = AnySavePolicy([policy, Waiting()])
    with rig.thread(UserPolicies(durable=both, ram=None, preservation=None)) as thread:
        rig.publish(1, thread)
        wait_until(lambda: policy.steps)
        for step in (2, 3):
            rig.publish(step, thread)
            rig.publish(step, thread)
        (late,) = caplog.messages
        assert late.startswith("Hanging.should_save or Waiting.should_save has not returned for")
        thread.close()
        assert caplog.messages[1].startswith(
            "close: Hanging.should_save or Waiting.should_save did"
        )
        policy.go_on.set()
        both.policies[1].go_on.set()


def test_a_preservation_policy_that_does_not_return_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_policies, "CLOSE_SECS", 0.01)
    rig, policy = Rig(), Hanging()
    made_at = datetime(2026, 1, 1, tzinfo=UTC).isoformat()
    newest = checkpoint_id(1, 1)
    data = [{"id": msgspec.to_builtins(newest), "time": made_at, "metrics": None}]
    with rig.thread(UserPolicies(durable=None, ram=None, preservation=policy)) as thread:
        thread.on_notice(Notice(kind="judge", id=newest, data=data))
        wait_until(lambda: thread._running)
        thread.close()
        (text,) = caplog.messages
        assert text.startswith("close: Hanging.should_preserve did not return within 0 s")
        policy.go_on.set()


def test_between_steps_the_thread_does_nothing() -> None:
    rig, policy = Rig(), Hanging()
    policy.go_on.set()
    asked: list[int] = []

    def published() -> int:
        asked.append(rig.step)
        return rig.step

    policies = UserPolicies(durable=policy, ram=None, preservation=None)
    with rig.thread(policies, published) as thread:
        for step in (1, 2):
            rig.publish(step, thread)
            wait_until(lambda step=step: policy.steps == [*range(1, step + 1)])
        count = len(asked)
        time.sleep(20 * user_policies.PAUSE_SECS)
        assert len(asked) == count


class Raising:
    """A policy of the user's that raises at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def should_save(self, step: int, previous_steps: Any, *, context: SaveContext) -> bool:
        if step == self.step:
            raise ValueError("my own mistake")
        return False


Call = Callable[[CheckpointManager, Any], bool]


def save_forced(manager: CheckpointManager, state: Any) -> bool:
    return manager.save(6, state, force=True)


def save_preempted(manager: CheckpointManager, state: Any) -> bool:
    os.kill(os.getpid(), signal.SIGTERM)
    return manager.save(6, state)


@pytest.mark.parametrize(
    ("save_last", "repeat"),
    [
        (lambda manager, state: manager.finish(6, state), lambda *_: True),
        (save_forced, save_forced),
        (save_preempted, lambda manager, state: manager.save(6, state)),
    ],
    ids=["finish", "force", "preemption"],
)
def test_a_policy_that_raises_costs_no_last_step(
    one_host: Host, tmp_path: Path, save_last: Call, repeat: Call
) -> None:
    state = {"w": np.zeros(10)}
    with CheckpointManager(
        tmp_path / "run", framework="numpy", save_decision_policy=Raising(5), ram=None
    ) as manager:
        for step in range(6):
            manager.save(step, state)
        wait_until(lambda: manager._progress.has_failed)
        with pytest.raises(HoldfastError, match="should_save raised ValueError"):
            save_last(manager, state)
        # The step was saved, and the caller may repeat the call that has raised.
        assert repeat(manager, state)
        assert manager.finish(6, state) is False
    with holdfast.open_run(tmp_path / "run") as run:
        assert (run.all_steps(), run.metadata(6).attempt) == ([6], 1)
