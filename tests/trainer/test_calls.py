"""Calls after `close`, and on another thread than the training's, are refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.trainer.lifetime import Calls
from tests.hosts import Host

STATE = {"w": jnp.ones(3)}
CALLS: dict[str, Callable[[holdfast.CheckpointManager], object]] = {
    "enter": lambda manager: manager.__enter__(),
    "save": lambda manager: manager.save(7, STATE),
    "finish": lambda manager: manager.finish(7, STATE),
    "resume": lambda manager: manager.resume(STATE),
    "restore": lambda manager: manager.restore(),
    "latest_step": lambda manager: manager.latest_step(),
    "all_steps": lambda manager: manager.all_steps(),
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "delete": lambda manager: manager.delete(0),
    "metadata": lambda manager: manager.metadata(0),
    "process_values": lambda manager: manager.process_values(0),
}


def in_thread(call: Callable[[], object]) -> BaseException | None:
    """What the call raises on another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except HoldfastError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_every_call_is_refused_after_close_and_from_another_thread(
    one_host: Host, tmp_path: Path
) -> None:
    never = save_decision_policy.SpecificStepsPolicy([0, 7])
    manager = holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=never)
    assert manager.save(0, STATE)
    for name, call in CALLS.items():
        error = in_thread(lambda call=call: call(manager))
        assert isinstance(error, InvalidArgumentError), name
        assert f"{name}: called on thread 'other'" in str(error)
        assert "used by thread 'MainThread'" in str(error)
    manager.wait_until_finished()
    assert manager.all_steps() == [0]
    manager.close()
    manager.close()
    for name, call in CALLS.items():
        with pytest.raises(InvalidArgumentError, match=rf"{name}: the manager of .*run is closed"):
            call(manager)
    assert not manager.reached_preemption(7)


def test_a_step_that_is_not_due_is_refused_after_close_too(one_host: Host, tmp_path: Path) -> None:
    never = save_decision_policy.SpecificStepsPolicy([10**9])
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=never) as manager:
        assert not manager.save(0, STATE)
    with pytest.raises(InvalidArgumentError, match="is closed"):
        manager.save(1, STATE)


def test_another_thread_may_follow_one_that_has_ended() -> None:
    calls = Calls(Path("runs/gpt"))
    assert in_thread(lambda: calls.check_call("save")) is None
    calls.check_call("close")
    assert isinstance(in_thread(lambda: calls.check_call("save")), InvalidArgumentError)
