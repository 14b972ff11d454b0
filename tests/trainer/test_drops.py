"""When an accepted save that is dropped is a failure, and what its rank is notified of."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from holdfast.errors import SaveFailedError
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import SKIPPED, Notice, PartTier, Sealed
from holdfast.trainer.save.drops import DROPPED_SECS, GATHER_SECS, POSTPONED_SECS
from holdfast.trainer.save.progress import Progress
from tests.attempts import checkpoint_id
from tests.trust.in_process import StepClock

Accept = Callable[..., CheckpointId]


class RunningClock(StepClock):
    """Moves by itself too, for waits that another thread ends."""

    def monotonic(self) -> float:
        return super().monotonic() + time.monotonic()


@pytest.fixture
def clock() -> StepClock:
    return RunningClock()


@pytest.fixture
def progress(clock: StepClock) -> Progress:
    return Progress(clock)


@pytest.fixture
def accept(progress: Progress) -> Accept:
    def accept(step: int, *, durable: bool = True, by_step: bool = False) -> CheckpointId:
        """Accept a save, whose part is sealed at once."""
        checkpoint = checkpoint_id(step)
        progress.accept(checkpoint, durable=durable, by_step=by_step)
        report = Sealed(rank=0, id=checkpoint, part_count=2, tier=PartTier.RAM, durable=durable)
        progress.seal(checkpoint, report)
        return checkpoint

    return accept


def notice(progress: Progress, checkpoint: CheckpointId, kind: str, reason: str) -> None:
    """Have the agent notify of that checkpoint."""
    progress.notice(Notice(kind=kind, id=checkpoint, reason=reason))


def failure(progress: Progress, *, at_end: bool = False) -> SaveFailedError | None:
    """What a `save` raises now, or `wait_until_finished` where it is `at_end`."""
    if not at_end and not progress.has_failed:
        return None
    try:
        if at_end:
            progress._raise_at_end(math.inf, lambda: None)
        with progress.drops_raised_after(1000):
            progress.raise_failure()
    except SaveFailedError as error:
        return error
    return None


def test_a_drop_that_a_newer_commit_makes_good_is_no_failure(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    notice(progress, accept(10), "dropped", "the ranks did not meet at one step")
    notice(progress, accept(12), "committed", "")
    clock.secs += 2 * DROPPED_SECS
    assert failure(progress) is None
    assert failure(progress, at_end=True) is None


def test_a_drop_that_comes_after_the_newer_commit_is_no_failure(
    progress: Progress, accept: Accept
) -> None:
    old = accept(10)
    notice(progress, accept(12), "committed", "")
    notice(progress, old, "dropped", "a newer checkpoint is complete")
    assert failure(progress, at_end=True) is None


@pytest.mark.parametrize(("durable", "is_good"), [(False, True), (True, False)])
def test_a_protected_checkpoint_makes_up_for_one_in_ram_alone(
    progress: Progress, accept: Accept, *, durable: bool, is_good: bool
) -> None:
    notice(progress, accept(10, durable=durable), "dropped", "no")
    notice(progress, accept(12, durable=False), "protected", "")
    assert (failure(progress, at_end=True) is None) == is_good


def test_an_older_commit_makes_up_for_nothing(progress: Progress, accept: Accept) -> None:
    older = accept(8)
    notice(progress, accept(10), "dropped", "no")
    notice(progress, older, "committed", "")
    error = failure(progress, at_end=True)
    assert error is not None
    assert error.steps == (10,)
    assert "the newest committed step is 8" in str(error)


def test_a_target_that_is_not_made_good_in_time_fails_at_the_next_save(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    for step in range(10, 13):
        notice(progress, accept(step), "dropped", "the ranks did not meet at one step")
        clock.secs += 1
    assert failure(progress) is None
    clock.secs += DROPPED_SECS
    error = failure(progress)
    assert error is not None
    assert error.steps == (10, 11, 12)
    assert "save steps 10, 11, 12: accepted and then dropped" in str(error)
    assert "the ranks did not meet at one step" in str(error)
    assert failure(progress) is None


def test_many_drops_of_saves_by_step_are_one_failure_whatever_is_committed_later(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    for step in range(150):
        notice(progress, accept(step, by_step=True), "dropped", "rank 1 had earlier ones")
    notice(progress, accept(200), "committed", "")
    assert failure(progress) is None
    clock.secs += GATHER_SECS
    error = failure(progress)
    assert error is not None
    assert error.steps == tuple(range(150))
    assert error.step == 0
    assert "8, 9, …, 140" in str(error)
    assert "(150 in all)" in str(error)
    assert failure(progress, at_end=True) is None


def test_drops_are_raised_after_the_step_is_saved_and_kept_where_it_is_not(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    notice(progress, accept(10, by_step=True), "dropped", "no")
    clock.secs += GATHER_SECS
    with pytest.raises(ZeroDivisionError), progress.drops_raised_after(11):
        1 / 0  # noqa: B018
    assert progress.raised_at is None
    with pytest.raises(SaveFailedError):
        progress.raise_failure()
    notice(progress, accept(12, by_step=True), "dropped", "no")
    clock.secs += GATHER_SECS
    with pytest.raises(SaveFailedError), progress.drops_raised_after(13):
        accept(13)
    assert progress.raised_at == 13
    assert progress.steps() == {13}


def test_a_preemption_that_all_ranks_have_confirmed_must_not_be_dropped(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    stopped_at = accept(10)
    progress.require(stopped_at)
    notice(progress, stopped_at, "dropped", "no")
    clock.secs += GATHER_SECS
    assert failure(progress) is not None


@pytest.mark.parametrize("kind", ["deleted", "left behind"])
def test_what_somebody_removed_or_went_back_behind_is_no_failure(
    progress: Progress, accept: Accept, kind: str
) -> None:
    notice(progress, accept(10, by_step=True), kind, "it was deleted")
    assert failure(progress, at_end=True) is None
    assert progress.outstanding() == 0


def test_a_notice_of_a_save_that_is_not_this_ranks_changes_nothing(progress: Progress) -> None:
    notice(progress, checkpoint_id(10), "dropped", "no")
    assert failure(progress, at_end=True) is None


def test_the_end_of_saving_waits_until_what_is_in_ram_alone_is_confirmed(
    progress: Progress, accept: Accept
) -> None:
    by_step, newer = accept(10, durable=False, by_step=True), accept(12, durable=False)
    ends = [
        threading.Timer(0.1, notice, (progress, newer, "protected", "")),
        threading.Timer(0.2, notice, (progress, by_step, "dropped", "no")),
    ]
    for end in ends:
        end.start()
    error = failure(progress, at_end=True)
    for end in ends:
        end.join()
    assert error is not None
    assert error.steps == (10,)
    assert failure(progress, at_end=True) is None


def test_what_no_other_host_confirms_has_failed_at_the_end(
    progress: Progress, accept: Accept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trainer.save.progress.CONFIRM_SECS", 0.1)
    progress.describe_parts = lambda checkpoint: f"rank 1 has no part of {checkpoint.step}"
    accept(10, durable=False)
    progress._raise_at_end(0.05, lambda: None)
    error = failure(progress, at_end=True)
    assert error is not None
    assert "other hosts did not confirm it within 0 s: rank 1 has no part of 10" in str(error)


def test_slower_ranks_that_still_confirm_extend_the_wait_of_a_rank_that_is_ahead(
    progress: Progress, accept: Accept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trainer.save.progress.CONFIRM_SECS", 0.4)
    saves = [accept(step, durable=False) for step in (10, 20, 30)]
    ends = [
        threading.Timer(0.25 * number, notice, (progress, save, "protected", ""))
        for number, save in enumerate(saves, 1)
    ]
    for end in ends:
        end.start()
    assert failure(progress, at_end=True) is None
    for end in ends:
        end.join()


def test_only_saves_that_the_agent_has_acknowledged_are_asked_for(
    progress: Progress, accept: Accept
) -> None:
    first, second = accept(10), accept(12)
    assert progress.pending() == ()
    progress.reported(first)
    assert progress.pending() == (first,)
    progress.reported(second)
    notice(progress, first, "committed", "")
    assert progress.pending() == (second,)


def test_a_drop_waits_while_a_newer_save_is_in_progress_but_not_for_ever(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    notice(progress, accept(10), "dropped", "the ranks did not meet at one step")
    accept(20)
    for _ in range(int(POSTPONED_SECS / DROPPED_SECS) - 1):
        clock.secs += DROPPED_SECS
        assert failure(progress) is None
    clock.secs += 2 * DROPPED_SECS
    error = failure(progress)
    assert error is not None
    assert error.steps == (10,)


def test_a_save_in_ram_in_progress_postpones_no_durable_one(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    notice(progress, accept(10), "dropped", "the ranks did not meet at one step")
    accept(20, durable=False)
    clock.secs += DROPPED_SECS
    assert failure(progress) is not None


def test_a_step_that_another_rank_skipped_is_replaced_by_a_newer_one(
    progress: Progress, accept: Accept, clock: StepClock
) -> None:
    notice(progress, accept(10, by_step=True), "dropped", f"rank 1 {SKIPPED}")
    clock.secs += 2 * GATHER_SECS
    assert failure(progress) is None
    notice(progress, accept(20, by_step=True), "committed", "")
    clock.secs += DROPPED_SECS
    assert failure(progress, at_end=True) is None


def test_the_first_step_that_another_rank_skipped_is_a_warning(
    progress: Progress, accept: Accept, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        notice(progress, accept(step, by_step=True), "dropped", f"rank 1 {SKIPPED}")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"step 10 is not saved: rank 1 {SKIPPED}"]


def test_with_warnings_a_drop_is_logged_and_raised_at_the_end_only(
    clock: StepClock, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress(clock, warns=True)
    progress.accept(checkpoint_id(10), durable=True, by_step=True)
    notice(progress, checkpoint_id(10), "dropped", "a rank has passed it")
    clock.secs += 2 * DROPPED_SECS
    assert failure(progress) is None
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "save step 10: accepted and then dropped" in line
    error = failure(progress, at_end=True)
    assert error is not None
    assert error.steps == (10,)
