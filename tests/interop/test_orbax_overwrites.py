"""Overwriting a step with Orbax's calls: the old checkpoint stays until the new one is durable."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import holdfast
import holdfast.interop.orbax as ocp
from holdfast.errors import InvalidArgumentError, SaveFailedError, StepOrderError
from holdfast.interop.orbax import v1
from tests.hosts import Host, host

SCRIPT = Path(__file__).with_name("orbax_killed_overwrite.py")
SIZE_MAX_BYTES = 200_000
ARRAY_SIZE = 100_000


@pytest.fixture(autouse=True)
def on_host(one_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in one_host.environment.items():
        monkeypatch.setenv(name, value)


def opened(folder: Path) -> Any:
    every = v1.training.save_decision_policies.FixedIntervalPolicy(1)
    return v1.training.Checkpointer(folder, save_decision_policy=every)


def state(value: int) -> dict[str, Any]:
    return {"w": jnp.full(ARRAY_SIZE, value)}


def check(checkpointer: Any, steps: list[int], newest: int) -> None:
    """Check which steps there are, and that all of the newest one has a value."""
    assert [one.step for one in checkpointer.checkpoints] == steps
    assert set(checkpointer.load()["w"].tolist()) == {newest}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with opened(tmp_path / "a") as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step))
    return tmp_path / "a"


def test_a_step_that_is_overwritten_while_the_one_before_is_removed_fences_nobody(
    folder: Path,
) -> None:
    with opened(folder) as checkpointer:
        for value in range(10, 30):
            assert checkpointer.save_async(2, state(value), overwrite=True) is not None
        checkpointer.save(3, state(3))
        check(checkpointer, [0, 1, 2, 3], 3)
        assert set(checkpointer.load(2)["w"].tolist()) == {29}


def test_the_newest_step_is_overwritten_after_it_was_reopened(folder: Path) -> None:
    with opened(folder) as checkpointer:
        assert checkpointer.save(2, state(9), overwrite=True)
        check(checkpointer, [0, 1, 2], 9)
        assert checkpointer.save(2, state(10), overwrite=True)
        check(checkpointer, [0, 1, 2], 10)
        assert checkpointer.save(3, state(3), overwrite=True)
        check(checkpointer, [0, 1, 2, 3], 3)
    with opened(folder) as checkpointer:
        check(checkpointer, [0, 1, 2, 3], 3)
        assert set(checkpointer.load(2)["w"].tolist()) == {10}


def test_a_state_that_cannot_be_saved_leaves_the_old_one(folder: Path) -> None:
    with opened(folder) as checkpointer:
        with pytest.raises(InvalidArgumentError):
            checkpointer.save(2, {"w": object()}, overwrite=True)
        check(checkpointer, [0, 1, 2], 2)
    with opened(folder) as checkpointer:
        check(checkpointer, [0, 1, 2], 2)


def test_an_overwrite_that_storage_refuses_leaves_the_old_one(
    folder: Path, one_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as checkpointer:
        assert checkpointer.save(2, state(8), overwrite=True)
        agent = one_host.agent().pid
        before = resource.prlimit(agent, resource.RLIMIT_FSIZE)
        resource.prlimit(agent, resource.RLIMIT_FSIZE, (SIZE_MAX_BYTES, before[1]))
        response = checkpointer.save_async(2, state(9), overwrite=True)
        with pytest.raises(SaveFailedError):
            response.result()
        assert [one.step for one in checkpointer.checkpoints] == [0, 1, 2]
        with host("host-b") as other, monkeypatch.context() as elsewhere:
            # The new one is in the RAM of this host alone.
            elsewhere.setenv("HOLDFAST_RAM", str(other.folder))
            elsewhere.setenv("HOLDFAST_HOST", other.name)
            with holdfast.open_run(folder / "holdfast") as run:
                assert set(run.restore(2, only="state/w")["state"]["w"].tolist()) == {8}
        resource.prlimit(agent, resource.RLIMIT_FSIZE, before)
        assert checkpointer.save(2, state(10), overwrite=True)
        check(checkpointer, [0, 1, 2], 10)


def test_a_process_that_is_killed_while_it_overwrites_leaves_the_old_one_or_the_new_one(
    folder: Path, one_host: Host
) -> None:
    process = one_host.start(SCRIPT, folder, ARRAY_SIZE)
    _, said = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL, said
    one_host.kill_agent()
    with opened(folder) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints] == [0, 1, 2]
        (value,) = set(checkpointer.load()["w"].tolist())
        assert value in (2, 9)


def test_an_older_step_is_not_overwritten_and_stays(folder: Path) -> None:
    with opened(folder) as checkpointer:
        assert not checkpointer.save(0, state(9), overwrite=True)
        with pytest.raises(StepOrderError, match="expected the newest step, which is 2"):
            checkpointer.save(0, state(9), overwrite=True, force=True)
        check(checkpointer, [0, 1, 2], 2)
        assert set(checkpointer.load(0)["w"].tolist()) == {0}


def test_a_step_that_orbax_wrote_is_removed_once_the_new_one_is_durable(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint", reason="Orbax cannot be had here")
    with orbax.CheckpointManager(tmp_path / "a") as manager:
        manager.save(3, args=orbax.args.StandardSave(state(3)))
        manager.wait_until_finished()
    with opened(tmp_path / "a") as checkpointer:
        with pytest.raises(InvalidArgumentError):
            checkpointer.save(3, {"w": object()}, overwrite=True)
        assert [one.step for one in checkpointer.checkpoints] == [3]
        assert (tmp_path / "a" / "3").is_dir()
        assert checkpointer.save(3, state(9), overwrite=True)
        check(checkpointer, [3], 9)
        assert sorted(os.listdir(tmp_path / "a")) == ["holdfast"]
        checkpointer.delete(3)
        assert checkpointer.latest is None


def test_a_newest_step_that_was_deleted_is_saved_again_after_a_reopening(tmp_path: Path) -> None:
    for number in range(2):
        with ocp.CheckpointManager(tmp_path / "a") as manager:
            if number:
                manager.delete(2)
            for step in range(2 * number, 3):
                assert manager.save(step, args=ocp.args.StandardSave({"n": step + 10 * number}))
            manager.wait_until_finished()
            assert manager.all_steps() == [0, 1, 2]
    with ocp.CheckpointManager(tmp_path / "a") as manager:
        assert manager.restore(2, args=ocp.args.StandardRestore({"n": 0})) == {"n": 12}
