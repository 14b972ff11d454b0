"""What became of saves: how failures are reported, and what a wait for all of them waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.commit import NOTHING_SAVED
from holdfast.errors import (
    FencedError,
    HoldfastError,
    SaveFailedError,
    StorageError,
    WaitTimeoutError,
)
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import Notice, Sealed
from holdfast.trainer.save import progress as module
from holdfast.trainer.save.progress import Progress
from tests.attempts import checkpoint_id
from tests.hosts import Host, wait_until

FIRST, SECOND = checkpoint_id(1), checkpoint_id(2)
HERE = {"id": (1, 1)}


def noticed(progress: Progress, kind: str, checkpoint: CheckpointId = FIRST, **more: Any) -> None:
    progress.notice(Notice(kind=kind, id=checkpoint, **more))


def waiting(progress: Progress, then: Callable[[], None]) -> float:
    """How long a wait lasts after `then` happens; it must not have ended before."""
    ended: list[float] = []

    def wait() -> None:
        progress.wait_until_finished(60.0)
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.1)
    assert not ended
    began = time.monotonic()
    then()
    thread.join(60)
    return ended[0] - began


def test_storage_that_fails_for_many_saves_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress = Progress(SystemClock())
    for checkpoint in (FIRST, SECOND):
        progress.accept(checkpoint, durable=True, by_step=True)
    for checkpoint in (FIRST, SECOND):
        noticed(progress, "failed", checkpoint, reason="no space left")
        # The agent does not know a save that has ended, and its answer may come late.
        progress.finish(checkpoint)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warned] == ["step 1 is not saved: no space left"]
    with pytest.raises(SaveFailedError, match="save steps 1, 2: 2 checkpoints were not made"):
        progress.raise_failure()


@pytest.fixture
def committed() -> Progress:
    """One save that the agent here has committed, after which it applies preservation."""
    progress = Progress(SystemClock())
    progress.accept(FIRST, durable=True, by_step=True)
    noticed(progress, "committed", data=HERE)
    return progress


@pytest.mark.parametrize(
    "then",
    [
        lambda progress: noticed(progress, "preserved"),
        lambda progress: progress.forget_preservation(),
        lambda progress: progress.notice(Notice(kind="unavailable", reason="gone")),
    ],
    ids=["applied", "another agent", "no agent"],
)
def test_a_wait_ends_once_preservation_is_applied_or_will_not_be_told(
    committed: Progress, then: Callable[[Progress], None]
) -> None:
    assert waiting(committed, lambda: then(committed)) < 0.8 * module.PRESERVED_SECS


def test_a_fenced_run_waits_for_no_preservation(committed: Progress) -> None:
    committed.stop_saving(FencedError("fenced"))
    with pytest.raises(FencedError):
        committed.wait_until_finished(60)


def test_a_preservation_that_hangs_is_waited_for_no_longer_than_its_bound(
    committed: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRESERVED_SECS", 0.2)
    committed.wait_until_finished(None)
    monkeypatch.setattr(module, "PRESERVED_SECS", 60.0)
    began = time.monotonic()
    committed.wait_until_finished(0.2)
    assert time.monotonic() - began < 30.0


def test_what_another_host_has_committed_and_what_was_told_first_are_not_waited_for() -> None:
    progress = Progress(SystemClock())
    for one in (FIRST, SECOND):
        progress.accept(one, durable=True, by_step=True)
    noticed(progress, "committed")
    noticed(progress, "preserved", SECOND)
    noticed(progress, "committed", SECOND, data=HERE)
    began = time.monotonic()
    progress.wait_until_finished(None)
    assert time.monotonic() - began < module.PRESERVED_SECS


def test_saves_that_are_on_their_way_end_the_wait_with_their_steps() -> None:
    progress = Progress(SystemClock())
    progress.accept(FIRST, durable=True, by_step=True)
    with pytest.raises(WaitTimeoutError, match=r"steps \[1\] are not durable after 0.05 s; saving"):
        progress.wait_until_finished(0.05)
    progress.describe_parts = lambda checkpoint: f"rank 1 has not saved step {checkpoint.step}"
    with pytest.raises(WaitTimeoutError, match=r"0.05 s; rank 1 has not saved step 1; saving"):
        progress.wait_until_finished(0.05)


def test_a_wait_without_a_timeout_has_the_deadline_of_close(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trainer.checkpoint_manager.CLOSE_SECS", 0.05)
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        # A save whose part another rank never seals.
        other = checkpoint_id(1)
        manager._progress.accept(other, durable=True, by_step=True)
        with pytest.raises(WaitTimeoutError, match="not durable after"):
            manager.wait_until_finished()
        manager._progress.fail_save(other, "not needed any more")
        with pytest.raises(SaveFailedError):
            manager.wait_until_finished()


class KeepsOdd:
    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        time.sleep(0.05)
        return [checkpoint.step % 2 == 1 for checkpoint in checkpoints]


class LatestSlowly:
    """Keeps the newest one, and answers once `committed` is set."""

    def __init__(self) -> None:
        self.committed = threading.Event()

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        assert self.committed.wait(240)
        return [checkpoint is checkpoints[-1] for checkpoint in checkpoints]


class Fails:
    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        raise ZeroDivisionError


def test_a_late_answer_of_a_policy_does_not_replace_the_answer_for_later_commits(
    one_host: Host, tmp_path: Path
) -> None:
    policy = LatestSlowly()
    with holdfast.CheckpointManager(
        tmp_path / "run",
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=policy,
    ) as manager:
        for step in range(4):
            manager.save(step, {"w": np.full(10, step)})
        deadline = time.monotonic() + 20
        while manager.latest_step() != 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # until the agent has asked about step 3 too
        policy.committed.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [3]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (preservation_policy.LatestN(2), lambda step: [step - 1, step]),
        (preservation_policy.LatestN(None), lambda step: list(range(step + 1))),
        (KeepsOdd(), lambda step: sorted({s for s in range(step) if s % 2} | {step})),
    ],
    ids=["latest", "all", "own"],
)
def test_after_a_wait_the_steps_are_those_that_stay(
    one_host: Host, tmp_path: Path, policy: Any, expected: Callable[[int], list[int]]
) -> None:
    with holdfast.CheckpointManager(
        tmp_path / "run",
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=policy,
    ) as manager:
        for step in range(12):
            assert manager.save(step, {"w": np.full(10, step)})
            manager.wait_until_finished()
            if step:
                assert manager.all_steps() == expected(step)


def test_a_policy_of_the_users_own_judges_what_an_agent_before_has_committed(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRESERVED_SECS", 100.0)
    began = time.monotonic()
    for start in (0, 4):
        with holdfast.CheckpointManager(
            tmp_path / "run",
            save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
            preservation_policy=KeepsOdd(),
        ) as manager:
            manager.resume({"w": np.full(10, 0)})
            for step in range(start, start + 4):
                assert manager.save(step, {"w": np.full(10, step)})
                manager.wait_until_finished()
            assert manager.all_steps() == list(range(1, start + 4, 2))
        one_host.kill_agents()
    assert time.monotonic() - began < 0.8 * module.PRESERVED_SECS


def test_a_policy_of_the_users_own_that_fails_keeps_all_and_holds_up_no_wait(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRESERVED_SECS", 100.0)
    raised: list[str] = []
    with holdfast.CheckpointManager(
        tmp_path / "run",
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=Fails(),
    ) as manager:
        began = time.monotonic()
        for step in range(3):
            assert manager.save(step, {"w": np.full(10, step)})
            try:
                manager.wait_until_finished()
            except HoldfastError as error:
                raised.append(str(error))
        assert time.monotonic() - began < 0.8 * module.PRESERVED_SECS
        # Step 0 is the newest, which stays without a policy.
        assert ["ZeroDivisionError" in text for text in raised] == [True, True]
        assert manager.all_steps() == [0, 1, 2]


def test_all_saves_that_failed_are_reported_together_and_once() -> None:
    progress = Progress(SystemClock())
    for step in (7, 3, 5):
        progress.accept(checkpoint_id(step), durable=True, by_step=True)
        progress.fail_save(checkpoint_id(step), f"reason {step}")
    with pytest.raises(SaveFailedError, match=r"steps 3, 5, 7.*reason 3.*reason 7") as raised:
        progress.raise_failure()
    assert (raised.value.step, raised.value.steps) == (3, (3, 5, 7))
    assert not progress.has_failed
    progress.raise_failure()


def test_one_save_that_failed_has_one_step() -> None:
    progress = Progress(SystemClock())
    progress.accept(checkpoint_id(7), durable=True, by_step=True)
    progress.fail_save(checkpoint_id(7), "no room")
    with pytest.raises(SaveFailedError, match=r"save step 7: .*no room") as raised:
        progress.raise_failure()
    assert raised.value.steps == (7,)


def test_an_error_of_another_kind_is_reported_besides_failed_saves() -> None:
    progress = Progress(SystemClock())
    progress.accept(checkpoint_id(7), durable=True, by_step=True)
    progress.fail_save(checkpoint_id(7), "no room")
    progress.stop_saving(FencedError("taken over"))
    with pytest.raises(SaveFailedError):
        progress.raise_failure()
    with pytest.raises(FencedError):
        progress.raise_failure()
    assert not progress.has_failed


def test_a_wait_that_runs_out_says_so() -> None:
    progress = Progress(SystemClock())
    assert progress.wait_finished(None)
    progress.accept(checkpoint_id(7), durable=True, by_step=True)
    assert not progress.wait_finished(0)
    assert not progress.wait_finished(0.01)


def test_a_run_that_is_opened_again_waits_for_no_preservation_that_has_ended(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent lingers, and reports the earlier commit again to one that attaches without RAM."""
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, {"w": np.zeros(10)}, force=True)
        manager.wait_until_finished()
    monkeypatch.setattr(module, "PRESERVED_SECS", 100.0)
    began = time.monotonic()
    with holdfast.CheckpointManager(tmp_path / "run", ram=None) as manager:
        wait_until(lambda: manager._progress._preserved, secs=module.PRESERVED_SECS / 4)
    assert time.monotonic() - began < 0.8 * module.PRESERVED_SECS


def test_a_save_that_is_accepted_after_the_end_of_saving_ends_with_an_error_too() -> None:
    progress = Progress(SystemClock())
    gone = StorageError("it was deleted")
    progress.stop_saving(gone)
    with pytest.raises(StorageError, match="it was deleted"):
        progress.raise_failure()
    progress.stop_saving(gone)
    progress.raise_failure()
    progress.accept(checkpoint_id(100), durable=True, by_step=True)
    # Race: the next agent reports the same before the save has failed by itself.
    progress.stop_saving(gone)
    progress.fail_save(checkpoint_id(100), "it was deleted")
    assert progress.wait_finished(0)
    with pytest.raises(StorageError, match="it was deleted"):
        progress.raise_failure()


def test_a_failure_that_lasts_does_not_say_that_training_may_continue() -> None:
    for reason, may_continue in (("disk full", True), (f"put back: {NOTHING_SAVED}", False)):
        progress = Progress(SystemClock())
        progress.accept(FIRST, durable=True, by_step=True)
        noticed(progress, "failed", reason=reason)
        with pytest.raises(SaveFailedError) as caught:
            progress.raise_failure()
        assert ("Training may continue" in str(caught.value)) is may_continue


@pytest.fixture
def warning() -> Progress:
    """Of a manager that warns of failed saves."""
    return Progress(SystemClock(), warns=True)


def failed(progress: Progress, step: int, *, durable: bool = True) -> None:
    progress.accept(checkpoint_id(step), durable=durable, by_step=True)
    progress.fail_save(checkpoint_id(step), f"no room for {step}")


def sealed(progress: Progress, *, durable: bool) -> None:
    """Accept a save of the second checkpoint, whose part is sealed at once."""
    progress.accept(SECOND, durable=durable, by_step=True)
    report = Sealed(rank=0, id=SECOND, part_count=1, tier="ram", durable=durable)
    progress.seal(SECOND, report)


def test_with_warnings_each_failed_save_is_logged_once_and_no_save_raises(
    warning: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        failed(warning, step)
        assert not warning.has_failed
        warning.raise_failure()
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert lines == [f"step {step} is not saved: no room for {step}" for step in (1, 2, 3)]


@pytest.mark.parametrize("newer", ["committed", "protected", "none"])
def test_with_warnings_the_end_raises_if_nothing_newer_is_safe(
    warning: Progress, newer: str
) -> None:
    failed(warning, 1)
    if newer != "none":
        # What is protected is in RAM alone.
        sealed(warning, durable=newer == "committed")
        noticed(warning, newer, SECOND)
    if newer == "committed":
        warning.wait_until_finished(1.0)
    else:
        with pytest.raises(SaveFailedError, match="save step 1: "):
            warning.wait_until_finished(1.0)
    # It is raised once.
    warning.wait_until_finished(1.0)


def test_with_warnings_a_save_in_ram_that_failed_is_replaced_by_a_protected_one(
    warning: Progress,
) -> None:
    failed(warning, 1, durable=False)
    sealed(warning, durable=False)
    noticed(warning, "protected", SECOND)
    warning.wait_until_finished(1.0)


def test_with_warnings_the_last_failed_save_is_raised_though_an_older_one_is_safe(
    warning: Progress,
) -> None:
    warning.accept(FIRST, durable=True, by_step=True)
    noticed(warning, "committed")
    failed(warning, 2)
    with pytest.raises(SaveFailedError, match="save step 2: "):
        warning.wait_until_finished(1.0)


def test_with_warnings_the_end_of_all_saving_is_raised(warning: Progress) -> None:
    failed(warning, 1)
    warning.stop_saving(FencedError("taken over"))
    assert warning.has_failed
    with pytest.raises(FencedError):
        warning.raise_failure()
