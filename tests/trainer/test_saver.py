"""The saver's thread beside the saves that go well: errors of memory, waits, later fences."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.adapt.contract import Hold, Snapshot
from holdfast.engine.saving.slots import RamSlots
from holdfast.errors import SaveFailedError
from holdfast.host.wire import protocol
from holdfast.trainer.save import save_queue
from holdfast.trainer.save.saver import Saver
from tests.hosts import Host, wait_until
from tests.trainer.slots import slots_of, wait_for_a_slot


@pytest.fixture
def manager(one_host: Host, tmp_path: Path) -> Iterator[holdfast.CheckpointManager]:
    with holdfast.CheckpointManager(
        tmp_path / "run",
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        framework="numpy",
    ) as made:
        made.resume(state(0))
        yield made


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(300_000, value)}


def test_an_error_of_memory_between_saves_does_not_end_the_savers_thread(
    manager: holdfast.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def failing(*arguments: object) -> None:
        failed.set()
        raise MemoryError

    wait_for_a_slot(manager)
    monkeypatch.setattr(RamSlots, "make_ready", failing)
    assert manager.save(0, state(0))
    assert failed.wait(240)
    assert manager.save(1, state(1))
    manager.wait_until_finished()
    assert (manager.restore(1)["w"] == 1).all()


@pytest.mark.parametrize(
    ("name", "error"),
    [("_complete", MemoryError), ("_ask", MemoryError), ("_complete", SystemExit)],
)
def test_an_error_in_a_save_fails_it_and_the_next_one_works(
    manager: holdfast.CheckpointManager,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: type[BaseException],
) -> None:
    wait_for_a_slot(manager)

    def failing(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Saver, name, failing)

        def save_and_wait() -> None:
            # On a busy machine the saver's thread may have failed before `save` returns.
            manager.save(0, state(0))
            manager.wait_until_finished(30)

        with pytest.raises(SaveFailedError, match=rf"step 0.*{error.__name__}"):
            save_and_wait()
    assert manager.save(1, state(1))
    manager.wait_until_finished()
    assert (manager.restore(1)["w"] == 1).all()


def test_a_forced_save_that_waits_says_once_for_what(
    manager: holdfast.CheckpointManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(save_queue, "WARN_SECS", 0.05)
    is_full = threading.Event()
    is_full.set()
    ask = Saver._ask

    def asked(self: Saver, name: str, message: Any, kind: Any) -> Any:
        if name == "slot" and is_full.is_set():
            return protocol.Slot(name=None, reason="the durable tier is behind", busy=True)
        if name == "spare":
            return protocol.Slot(name=None, reason="not now")
        return ask(self, name, message, kind)

    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        return [text for text in found if "the training has waited" in text]

    # From now on no slot is given out, so the first one has to be ready.
    wait_for_a_slot(manager)
    monkeypatch.setattr(Saver, "_ask", asked)
    assert manager.save(0, state(0))
    manager._progress.wait(lambda sealed, finished: sealed, 30)
    assert manager.save(1, state(1), force=True)
    wait_until(lambda: manager._parts.position.saver._queue._waiting is None)
    assert manager.save(2, state(2), force=True)
    assert not warnings()

    def free_once_warned() -> None:
        try:
            wait_until(warnings)
        finally:
            is_full.clear()

    go_on = threading.Thread(target=free_once_warned)
    go_on.start()
    with caplog.at_level(logging.WARNING):
        assert manager.save(3, state(3), force=True)
    go_on.join()
    manager.wait_until_finished()
    (text,) = warnings()
    assert text.startswith("save step 3: the training has waited for 0 s, and goes on waiting, for")
    assert "RAM for step 1 (the durable tier is behind); not ended before it: [" in text


class Fenced:
    """A borrowed snapshot that the training changes only behind a fence after `save`."""

    def __init__(self, snapshot: Snapshot, fences: list[Callable[[], None]]) -> None:
        self._snapshot = snapshot
        self._fences = fences

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)

    def at_fence(self, finish: Callable[[], None]) -> bool:
        self._fences.append(finish)
        return True


@pytest.mark.parametrize("has_slot", [True, False])
@pytest.mark.parametrize("is_copied_before", [True, False])
def test_a_state_is_saved_as_it_was_although_it_changes_behind_its_fence(
    manager: holdfast.CheckpointManager,
    monkeypatch: pytest.MonkeyPatch,
    has_slot: bool,
    is_copied_before: bool,
) -> None:
    fences: list[Callable[[], None]] = []
    snapshot = manager._process.framework.snapshot
    monkeypatch.setattr(
        manager._process.framework, "snapshot", lambda state: Fenced(snapshot(state), fences)
    )
    wait_for_a_slot(manager)
    if not has_slot:
        slots_of(manager).release_ready()
    made = state(5)
    with contextlib.ExitStack() as stack:
        if has_slot and not is_copied_before:
            # The saver's thread cannot begin, so the training thread copies at the fence.
            begin, writing = threading.Event(), Saver._write
            stack.callback(begin.set)

            def late(self: Saver, request: Any) -> str | None:
                begin.wait(240)
                return writing(self, request)

            monkeypatch.setattr(Saver, "_write", late)
        assert manager.save(0, made)
        assert len(fences) == has_slot
        if has_slot and is_copied_before:
            manager._progress.wait(lambda sealed, finished: sealed, 30)
        for finish in fences:
            finish()
            finish()
        made["w"][:] = 6
    manager.wait_until_finished()
    assert (manager.restore(0)["w"] == 5).all()


def test_an_exception_at_the_fence_fails_a_state_that_is_not_copied(
    manager: holdfast.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences: list[Callable[[], None]] = []
    made = manager._process.framework.snapshot(state(5))
    fenced = Fenced(made, fences)

    def interrupted(chunk: Any) -> memoryview:
        raise KeyboardInterrupt

    begin, writing = threading.Event(), Saver._write

    def late(self: Saver, request: Any) -> str | None:
        begin.wait(240)
        return writing(self, request)

    monkeypatch.setattr(Saver, "_write", late)
    monkeypatch.setattr(made, "chunk_bytes", interrupted)
    monkeypatch.setattr(manager._process.framework, "snapshot", lambda state: fenced)
    wait_for_a_slot(manager)
    assert manager.save(0, state(5))
    assert fenced.hold is Hold.BORROWED
    with pytest.raises(KeyboardInterrupt):
        fences[0]()
    begin.set()
    with pytest.raises(SaveFailedError, match="KeyboardInterrupt was raised"):
        manager.wait_until_finished(30)
