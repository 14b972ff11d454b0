"""The last step of a run that ends normally is kept, and one that is left behind is told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import errors, save_decision_policy
from holdfast.engine.lifecycle.catalog import Listing
from holdfast.engine.reading.view import View
from holdfast.trainer.finisher import Ending, FinishPlan, Having, having_of, plan_of
from tests.attempts import checkpoint_id
from tests.hosts import Host, await_events, events, wait_until
from tests.manifests import manifest_path
from tests.trainer.test_processes import results, start_job

NEVER = save_decision_policy.SpecificStepsPolicy([10**9])
NOTHING, IN_RAM, DURABLE = Having
LAST = checkpoint_id(9, 2)


def manager(directory: Path, **options: Any) -> holdfast.CheckpointManager:
    options = {"save_decision_policy": NEVER} | options
    return holdfast.CheckpointManager(directory, **options)


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(10, value), "n": value}


@pytest.mark.parametrize(
    ("found", "plan"),
    [
        ([DURABLE], FinishPlan.NOTHING),
        ([DURABLE, DURABLE], FinishPlan.NOTHING),
        ([NOTHING, NOTHING], FinishPlan.SAVE),
        ([IN_RAM], FinishPlan.MAKE_DURABLE),
        ([IN_RAM, DURABLE], FinishPlan.MAKE_DURABLE),
        ([NOTHING, IN_RAM], FinishPlan.SAVE_AGAIN),
        ([DURABLE, NOTHING], FinishPlan.SAVE_AGAIN),
    ],
)
def test_all_ranks_do_the_same_with_the_last_step(found: list[Having], plan: FinishPlan) -> None:
    assert plan_of([Ending(9, having, 9) for having in found]) is plan


def test_ranks_that_give_different_last_steps_are_refused() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"finish step 9: .* 8 on rank 1"):
        plan_of([Ending(9, NOTHING, 8), Ending(8, NOTHING, 8)])


@pytest.mark.parametrize("found", [[NOTHING], [NOTHING, NOTHING], [DURABLE, NOTHING]])
def test_a_last_step_that_would_abandon_later_ones_is_refused(found: list[Having]) -> None:
    endings = [Ending(9, having, 9 + rank) for rank, having in enumerate([*found, NOTHING])]
    with pytest.raises(errors.StepOrderError, match=r"finish step 9: expected a step after"):
        plan_of(endings)
    assert plan_of([Ending(9, DURABLE, 12)]) is FinishPlan.NOTHING


PART = {"part-00001-of-00002.json": 1, "image-00001-of-00002.safetensors": 1}


# Of a committed checkpoint no sizes are given.
@pytest.mark.parametrize(
    ("durable", "ram", "accepted", "due", "having"),
    [
        ({}, {}, False, False, NOTHING),
        ({LAST: None}, {}, False, False, DURABLE),
        ({checkpoint_id(9): None}, {}, False, False, DURABLE),
        # Of a branch that was left, which the timeline does not have.
        ({checkpoint_id(9, 0): None}, {}, False, False, NOTHING),
        ({LAST: PART}, {}, True, False, NOTHING),
        ({}, {LAST: PART}, True, False, IN_RAM),
        ({}, {LAST: PART}, True, True, DURABLE),
        # Of an attempt before this one: the agent takes no word of this one's processes on it.
        ({}, {checkpoint_id(9): PART}, False, False, NOTHING),
    ],
)
def test_what_a_rank_has_of_the_last_step(
    durable: dict, ram: dict, accepted: bool, due: bool, having: Having
) -> None:
    listings = {
        name: {one: Listing(sizes or {}, sizes is None) for one, sizes in tier.items()}
        for name, tier in (("ram", ram), ("durable", durable))
    }
    timeline = tuple(one for tier in (durable, ram) for one in tier if one.attempt.number > 0)
    view = View((), listings, timeline, {})
    assert having_of(LAST, 1, view, is_accepted=accepted, is_due=due) is having


def test_finish_saves_the_last_step_once_whatever_the_policy(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with manager(run) as training:
        for step in range(5):
            assert not training.save(step, state(step))
        assert training.finish(4, state(4), metrics={"loss": 0.5})
        assert not training.finish(4, state(4))
    with manager(run) as again:
        assert again.resume(state(-1))[0] == 5
        assert again.latest_step() == 4
        assert again.metadata(4).metrics == {"loss": 0.5}
        assert not again.finish(4, state(4))
        assert again.all_steps() == [4]
    assert [e["step"] for e in await_events(run, "committed", count=1)] == [4]
    assert "closing after" not in caplog.text


def test_finish_saves_a_step_that_was_not_given_to_save(one_host: Host, tmp_path: Path) -> None:
    with manager(tmp_path / "run") as training:
        training.save(0, state(0))
        assert training.finish(7, state(7))
        with pytest.raises(errors.StepOrderError, match="finish step 5: expected a step after 7"):
            training.finish(5, state(5))
        for step in (-1, "7", True):
            with pytest.raises(errors.InvalidArgumentError, match="step"):
                training.finish(step, state(7))
    with manager(tmp_path / "run") as again:
        assert again.resume(state(-1))[0] == 8


def test_finish_makes_a_step_durable_that_only_ram_has(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    with manager(run, ram=holdfast.RamTier(save_decision_policy=every_step)) as training:
        for step in range(4):
            assert training.save(step, state(step))
        assert training.finish(3, state(3))
        training.wait_until_finished()
        # The agent writes events after it has answered.
        wait_until(lambda: [e["step"] for e in events(run, "committed")] == [3])
        assert training.metadata(3).attempt == 1
        assert not training.finish(3, state(3))
    assert manifest_path(run, 3).exists()


@pytest.mark.usefixtures("quick_tries")
def test_finish_saves_although_an_earlier_save_has_failed(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with manager(run) as training:
        (run / "checkpoints").write_text("in the way")
        training.save(0, state(0), force=True)
        wait_until(lambda: training._progress.has_failed)
        (run / "checkpoints").unlink()
        with pytest.raises(errors.SaveFailedError) as caught:
            training.finish(4, state(4))
        assert caught.value.step == 0
    with manager(run) as again:
        assert again.resume(state(-1))[0] == 5


@pytest.mark.usefixtures("quick_tries")
@pytest.mark.parametrize("has_room", [True, False])
def test_finish_saves_the_last_step_anew_if_its_save_has_failed(
    one_host: Host, tmp_path: Path, has_room: bool
) -> None:
    run = tmp_path / "run"
    training = manager(run, on_save_failure="warn")
    (run / "checkpoints").write_text("in the way")
    training.save(3, state(3), force=True)
    wait_until(lambda: not training._progress.steps())
    if has_room:
        (run / "checkpoints").unlink()
    assert training.finish(3, state(3))
    if has_room:
        training.close()
        with manager(run) as again:
            assert again.resume(state(-1))[0] == 4
        return
    with pytest.raises(errors.SaveFailedError, match="step"):
        training.close()


def test_a_preempted_run_is_not_taken_for_a_finished_one(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(tmp_path / "run") as training:
        training.save(0, state(0))
        os.kill(os.getpid(), signal.SIGTERM)
        assert training.save(1, state(1))
        assert training.reached_preemption(1)
        assert not training.finish(9, state(1))
        assert "finish step 9: not saved" in caplog.text
        assert not training.finish(1, state(1))
    with manager(tmp_path / "run") as again:
        assert again.resume(state(-1))[0] == 2
    assert "closing after" not in caplog.text


@pytest.mark.parametrize("is_saved", [True, False])
def test_closing_tells_once_of_a_last_step_that_is_left_behind(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_saved: bool
) -> None:
    with manager(tmp_path / "run") as training:
        training.save(0, state(0), force=is_saved)
        training.save(1, state(1))
    (told,) = [r.message for r in caplog.records if "closing after step 1" in r.message]
    assert "manager.finish(1, state)" in told
    assert ("of step 0" in told) == is_saved
    assert "\n" not in told
    training.close()
    caplog.clear()
    # One that only resumes has left nothing behind.
    with manager(tmp_path / "run") as again:
        again.resume(state(-1))
    assert "closing after" not in caplog.text


@pytest.mark.parametrize(
    ("leaf", "metrics"),
    [({1, 2}, None), (1, {"loss": "low"})],
    ids=["leaf", "metrics"],
)
def test_closing_does_not_take_a_refused_save_for_an_omitted_one(
    one_host: Host,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    leaf: object,
    metrics: dict[str, Any] | None,
) -> None:
    with manager(tmp_path / "run") as training:
        training.save(0, state(0), force=True)
        with pytest.raises((errors.InvalidArgumentError, errors.UnsupportedLeafError)):
            training.save(1, {**state(1), "bad": leaf}, force=True, metrics=metrics)
    (text,) = [r.message for r in caplog.records if "closing after step 1" in r.message]
    assert "whose save was refused: the newest checkpoint is of step 0" in text
    assert "manager.finish" not in text


@pytest.mark.parametrize(("code", "is_told"), [(0, True), (None, True), (3, False)])
def test_closing_tells_the_same_where_the_program_leaves_the_block_by_an_exit(
    one_host: Host,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    code: int | None,
    is_told: bool,
) -> None:
    def train() -> None:
        with manager(tmp_path / "run") as training:
            training.save(0, state(0), force=True)
            training.save(1, state(1))
            sys.exit(code)

    with pytest.raises(SystemExit):
        train()
    assert ("closing after step 1" in caplog.text) == is_told


def test_closing_tells_nothing_after_an_error(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with manager(tmp_path / "run") as training:
            training.save(0, state(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "closing after" not in caplog.text


def test_all_ranks_finish_with_the_same_step(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = results(start_job(one_host, run, 2, steps=4, interval=100, finish=3))
    assert [(r["finished"], r["steps"]) for r in found] == [(True, [0, 3])] * 2
    found = results(start_job(one_host, run, 2, steps=0, interval=100, finish=3))
    assert [(r["start"], r["right"], r["finished"]) for r in found] == [(4, True, False)] * 2
