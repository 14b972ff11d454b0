"""The wait for the remote tier: a trainer asks its agent, and again when the agent has news."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdfast.clock import SystemClock
from holdfast.errors import AgentUnavailableError, WaitTimeoutError
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import Notice, Upload, Uploaded
from holdfast.trainer.save import patience as module
from holdfast.trainer.save.patience import Patience
from holdfast.trainer.save.progress import Progress
from tests.engine.making import Made, begin, disk
from tests.hosts import wait_until


class Agent:
    """A session with an agent that knows what is in the remote tier."""

    def __init__(self) -> None:
        self.uploaded: CheckpointId | None = None
        self.asked: list[CheckpointId] = []
        self.error: Exception | None = None

    def call(self, name: str, message: Upload, kind: type[Uploaded]) -> Uploaded:
        assert (name, kind) == ("upload", Uploaded)
        self.asked.append(message.id)
        if self.error is not None:
            raise self.error
        is_there = self.uploaded is not None and self.uploaded.age >= message.id.age
        return Uploaded(is_there=is_there, problem="" if is_there else "no space left")


class Rig:
    """A trainer of a run whose directory has a checkpoint."""

    def __init__(self, root: Path) -> None:
        durable = disk(root)
        begin(durable, None)
        made = Made()
        made.add(("w",), np.arange(8))
        made.save(durable)
        self.newest = made.id
        self.agent, self.clock = Agent(), SystemClock()
        self.progress = Progress(self.clock)
        session: Any = self.agent
        steps: Any = None
        self.patience = Patience(session, self.progress, steps, self.clock, host_count=2)
        home = SimpleNamespace(location_text="s3://bucket/run")
        self.run: Any = SimpleNamespace(durable=durable, remote=SimpleNamespace(home=home))

    def wait(self, timeout_secs: float | None) -> None:
        self.patience.await_upload(self.run, timeout_secs)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_notice_ends_the_wait_at_once_and_the_agent_is_not_polled(rig: Rig) -> None:
    waiting = threading.Thread(target=rig.wait, args=(None,))
    waiting.start()
    wait_until(lambda: bool(rig.agent.asked))
    time.sleep(0.2)
    assert waiting.is_alive()
    rig.progress.notice(Notice(kind="committed", id=rig.newest))
    rig.agent.uploaded = rig.newest
    rig.progress.notice(Notice(kind="uploaded", id=rig.newest))
    waiting.join(module.ASK_SECS / 2)
    assert not waiting.is_alive()
    assert rig.agent.asked == [rig.newest] * 2


def test_a_notice_of_another_copy_does_not_end_the_wait(rig: Rig) -> None:
    """It may be of an attempt that the ranks have left for an earlier checkpoint."""
    later = CheckpointId(rig.newest.step + 9, rig.newest.attempt)
    rig.progress.notice(Notice(kind="uploaded", id=later))
    with pytest.raises(WaitTimeoutError):
        rig.wait(0.1)


def test_an_agent_that_has_taken_the_place_of_another_one_is_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_SECS", 0.05)
    waiting = threading.Thread(target=rig.wait, args=(None,))
    waiting.start()
    # The next agent learns only from the call that the newest checkpoint is wanted.
    wait_until(lambda: len(rig.agent.asked) > 2)
    rig.agent.uploaded = rig.newest
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("timeout_secs", [0.0, 0.2, 1.3])
def test_the_wait_ends_in_time_and_names_the_problem(rig: Rig, timeout_secs: float) -> None:
    began = time.monotonic()
    text = rf"step {rig.newest.step} in the remote tier s3://.* after {timeout_secs:g} s \(no space"
    with pytest.raises(WaitTimeoutError, match=text):
        rig.wait(timeout_secs)
    # An agent that has just been started gets a second to find out what is there.
    assert max(1.0, timeout_secs) <= time.monotonic() - began < timeout_secs + 30
    rig.agent.uploaded = rig.newest
    rig.wait(timeout_secs)


def test_an_agent_that_does_not_answer_is_an_error(rig: Rig) -> None:
    rig.agent.error = AgentUnavailableError("call the agent")
    with pytest.raises(AgentUnavailableError):
        rig.wait(None)


def test_nothing_is_awaited_of_a_run_without_a_durable_checkpoint(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.run.durable = disk(tmp_path / "empty")
    rig.wait(0.0)
    assert rig.agent.asked == []
