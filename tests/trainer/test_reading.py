"""`restore` reads and changes nothing of the run; `resume(state, step=...)` goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy
from tests.hosts import Host, await_events, events
from tests.trainer.test_processes import results, start_job

EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)


def manager(directory: Path, kept: int | None = None) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        directory,
        save_decision_policy=EVERY_STEP,
        preservation_policy=preservation_policy.LatestN(kept),
    )


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(10, value), "n": value}


def attempts(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "attempts").iterdir())


def test_a_look_at_an_older_step_changes_nothing_of_the_run(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with manager(run) as training:
        for step in range(4):
            assert training.save(step, state(step))
        training.wait_until_finished()
        before = attempts(run)
        for step in (1, 3, None):
            assert training.restore(step)["n"] == (3 if step is None else step)
            assert training.last_restore is not None
        assert training.latest_step() == 3
        assert training.save(4, state(4))
        assert training.restore(0, like=state(-1))["n"] == 0
        assert training.save(5, state(5))
        training.wait_until_finished()
        assert training.all_steps() == list(range(6))
        assert training.metadata(5).attempt == 1
    assert attempts(run) == before
    assert [e["step"] for e in await_events(run, "read", count=4)] == [1, 3, 3, 0]
    assert not events(run, "restored")
    with manager(run) as again:
        assert again.restore(1)["n"] == 1
        assert again.save(6, state(6))
    with manager(run) as again:
        assert again.resume(state(-1))[0] == 7


def test_a_save_behind_the_newest_step_after_a_look_tells_how_to_go_back(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with manager(run) as training:
        for step in (10, 20, 30):
            training.save(step, state(step))
    told = r"restore\(20\) only reads.*resume\(state, step=20\)"
    with manager(run) as again:
        again.restore(20)
        for step in (21, 20):
            with pytest.raises(errors.StepOrderError, match=rf"save step {step}: .*{told}"):
                again.save(step, state(step))
        start, resumed = again.resume(state(-1), step=20)
        assert (start, resumed["n"]) == (21, 20)
        assert again.save(21, state(21))
        again.wait_until_finished()
        assert again.all_steps() == [10, 20, 21]
        assert again.metadata(21).attempt > again.metadata(20).attempt
    # One that has looked at nothing is told as well.
    with manager(run) as fresh:
        with pytest.raises(
            errors.StepOrderError, match=r"expected a step after 21, .*resume\(state, step=N\)"
        ):
            fresh.save(15, state(15))
        with pytest.raises(errors.StepExistsError, match="force=True"):
            fresh.save(21, state(21))


@pytest.mark.parametrize("kept", [2, None], ids=["deleted", "present"])
def test_saving_an_older_step_again_abandons_no_later_one(
    one_host: Host, tmp_path: Path, kept: int | None
) -> None:
    with manager(tmp_path / "run", kept) as training:
        for step in range(6):
            training.save(step, state(step))
            training.wait_until_finished()
        steps = training.all_steps()
        assert (1 in steps) == (kept is None)
        with pytest.raises(errors.StepOrderError, match=r"expected a step after 5, .*resume"):
            training.save(1, state(1), force=True)
        if kept is None:
            # Durable already.
            assert not training.finish(1, state(1))
        else:
            with pytest.raises(errors.StepOrderError, match=r"finish step 1: .* after 5, .*resume"):
                training.finish(1, state(1))
        assert training.all_steps() == steps
        # The newest one is overwritten, and nothing else.
        assert training.save(5, state(50), force=True)
        training.wait_until_finished()
        assert training.all_steps() == steps
        assert training.restore()["n"] == 50


def test_going_back_to_a_step_that_is_not_there_changes_nothing(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as training:
        training.save(3, state(3))
        training.wait_until_finished()
        for call in (training.restore, lambda step: training.resume(state(-1), step=step)):
            with pytest.raises(errors.StepNotFoundError, match="step 2"):
                call(2)
            with pytest.raises(errors.InvalidArgumentError, match="step"):
                call(-1)
        assert training.save(4, state(4))
        training.wait_until_finished()
        assert training.metadata(4).attempt == 1


def test_numpy_integers_are_steps_in_every_call(one_host: Host, tmp_path: Path) -> None:
    of = np.int64
    with manager(tmp_path / "run") as training:
        for step in range(3):
            assert training.save(of(step), state(step))
        assert not training.reached_preemption(of(2))
        training.wait_until_finished()
        assert training.restore(of(1))["n"] == 1
        assert training.metadata(of(1)).step == 1
        assert training.process_values(of(1)) == {}
        assert not training.finish(of(2), state(2))
        training.delete(of(1))
        assert training.resume(state(-1), step=of(0))[0] == 1
        assert training.save(of(1), state(1), force=True)
        training.wait_until_finished()
        assert training.all_steps() == [0, 1]


def test_byte_orders_come_back_as_asked_for_or_native(one_host: Host, tmp_path: Path) -> None:
    values = np.arange(6, dtype=">f4").reshape(2, 3)
    with manager(tmp_path / "run") as training:
        training.save(0, {"big": values, "little": values.astype("<f4"), "scalar": values[1, 2]})
        native = training.restore(0)
        like = {
            "big": np.zeros((2, 3), ">f4"),
            "little": np.zeros((2, 3), ">f4"),
            "scalar": values[0, 0],
        }
        asked = training.restore(0, like=like)
    for name, dtype in (("big", "<f4"), ("little", "<f4")):
        assert native[name].dtype == np.dtype(dtype).newbyteorder("=")
        assert asked[name].dtype == np.dtype(">f4")
        np.testing.assert_array_equal(native[name], values)
        np.testing.assert_array_equal(asked[name], values)
        asked[name][0, 0] = 1
    assert native["scalar"] == asked["scalar"] == 5.0


@pytest.mark.soak
def test_all_ranks_look_at_an_older_step_and_go_back_to_it_together(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, steps=6, interval=1))
    found = results(start_job(one_host, run, 2, steps=2, interval=1, look_at=1))
    assert [(r["start"], r["looked"], r["steps"]) for r in found] == [(6, True, list(range(8)))] * 2
    found = results(start_job(one_host, run, 2, steps=2, interval=1, back_to=1))
    assert [(r["start"], r["right"], r["steps"]) for r in found] == [(2, True, [0, 1, 2, 3])] * 2


KINDS = {"jax": jax.Array, "numpy": np.ndarray}


@pytest.mark.parametrize("framework", KINDS)
def test_without_a_like_arrays_are_those_of_the_manager_s_framework(
    one_host: Host, tmp_path: Path, framework: str
) -> None:
    w, wide = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.float64)
    state = {"w": w, "wide": wide, "scale": np.float32(0.5), "n": 3}
    if framework == "jax":
        state |= {"w": jnp.asarray(w), "key": jax.random.key(1)}
    with holdfast.CheckpointManager(tmp_path / "run", framework=framework) as saving:
        saving.save(0, state, force=True)
        found = saving.restore(0)
        assert saving.restore(0, only="w").keys() == {"w"}
    assert isinstance(found["w"], KINDS[framework])
    np.testing.assert_array_equal(found["w"], w)
    # JAX has no float64 here, and a NumPy scalar is one in every framework.
    assert (type(found["wide"]), type(found["scale"])) == (np.ndarray, np.float32)
    np.testing.assert_array_equal(found["wide"], wide)
    assert found["n"] == 3
    if framework == "jax":
        assert found["key"] == state["key"]
    with holdfast.open_run(tmp_path / "run") as run:
        assert type(run.restore(0)["w"]) is np.ndarray


def test_a_manager_and_a_run_show_their_run_and_step(one_host: Host, tmp_path: Path) -> None:
    where = str(tmp_path / "run")
    with manager(tmp_path / "run") as training:
        assert repr(training) == f"CheckpointManager({where!r}, attempt=1, step=None)"
        training.save(3, state(3))
        assert repr(training) == f"CheckpointManager({where!r}, attempt=1, step=3)"
    assert repr(training) == f"CheckpointManager({where!r}, attempt=1, step=3, closed)"
    with manager(tmp_path / "run") as again:
        assert again.resume(state(0))[0] == 4
        assert repr(again) == f"CheckpointManager({where!r}, attempt=2, step=3)"
    with holdfast.open_run(where) as run:
        assert repr(run) == f"Run({where!r}, step=None)"
        assert run.latest_step() == 3
        assert repr(run) == f"Run({where!r}, step=3)"
        run.restore()
        assert repr(run) == f"Run({where!r}, step=3)"
    assert repr(run) == f"Run({where!r}, step=3, closed)"
    assert repr(object.__new__(holdfast.CheckpointManager)) == "CheckpointManager(not open)"
