"""A step that no policy asked for, saved by the manager when an exception ends the training."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import holdfast
from holdfast import save_decision_policy
from holdfast.errors import InvalidArgumentError
from tests.hosts import Host, ending, wait_until

RANKS = Path(__file__).with_name("failing_ranks.py")
KEEPING = holdfast.ProcessHooks(keep_last=True)
SELDOM = save_decision_policy.FixedIntervalPolicy(100)


class Counter:
    """An object with a state of its own, as a data loader is."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def managed(run: Path, framework: str | None = None) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        run, save_decision_policy=SELDOM, process=KEEPING, framework=framework
    )


def steps_of(run: Path) -> list[int]:
    with holdfast.open_run(run) as reader:
        return reader.all_steps()


def torch_state() -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return {"net": net, "optimizer": optimizer, "loader": Counter(), "rate": 0.0}


def torch_step(state: dict[str, Any], step: int) -> None:
    state["loader"].count = step
    state["optimizer"].zero_grad()
    state["net"](torch.ones(2, 4)).sum().backward()
    state["optimizer"].step()
    state["rate"] = float(step)


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt(), MemoryError()])
def test_a_step_of_pytorch_that_was_not_due_is_saved_after_an_exception(
    error: BaseException, one_host: Host, tmp_path: Path
) -> None:
    state = torch_state()
    with contextlib.suppress(type(error)), managed(tmp_path, "torch") as manager:
        manager.resume(state)
        for step in range(8):
            torch_step(state, step)
            manager.save(step, state, metrics={"loss": 8.0 - step})
        weight = state["net"].weight.detach().clone()
        # What belongs to the next step: its batch, a new rate, and a part of its backward pass.
        state["loader"].count, state["rate"] = 8, 8.0
        state["optimizer"].zero_grad()
        state["net"](torch.ones(2, 4)).sum().backward()
        raise error
    assert steps_of(tmp_path) == [0, 7]
    again = torch_state()
    with managed(tmp_path, "torch") as manager:
        start, again = manager.resume(again)
        assert manager.metadata(7).metrics == {"loss": 1.0}
    assert (start, again["rate"], again["loader"].count) == (8, 7.0, 7)
    assert torch.equal(again["net"].weight, weight)


def test_a_state_that_has_changed_since_is_not_saved(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    state = torch_state()
    with contextlib.suppress(ValueError), managed(tmp_path, "torch") as manager:
        for step in range(8):
            torch_step(state, step)
            manager.save(step, state)
        with torch.no_grad():
            state["net"].bias.add_(1.0)
        raise ValueError("half a step")
    assert steps_of(tmp_path) == [0]
    assert "step 7, the last one, cannot be saved any more: net/bias has changed" in caplog.text


def test_without_an_exception_or_with_a_saved_step_nothing_more_is_saved(
    one_host: Host, tmp_path: Path
) -> None:
    state = torch_state()
    with managed(tmp_path, "torch") as manager:
        for step in range(3):
            torch_step(state, step)
            manager.save(step, state)
    assert steps_of(tmp_path) == [0]
    with contextlib.suppress(ValueError), managed(tmp_path, "torch") as manager:
        manager.resume(state)
        manager.save(1, state, force=True)
        raise ValueError("bad")
    assert steps_of(tmp_path) == [0, 1]


def jax_state() -> dict[str, Any]:
    return {"w": jnp.arange(4.0), "key": jax.random.key(7), "loader": Counter(), "rate": 0.0}


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_a_step_of_jax_is_saved_where_its_arrays_were_not_donated(
    donated: tuple[int, ...],
    one_host: Host,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    update = jax.jit(lambda w: w + 1, donate_argnums=donated)
    state = jax_state()
    with contextlib.suppress(ValueError), managed(tmp_path, "jax") as manager:
        manager.resume(state)
        for step in range(8):
            state["loader"].count = step
            state = state | {"w": update(state["w"]), "rate": float(step)}
            manager.save(step, state)
        state["loader"].count = 8
        update(state["w"])
        raise ValueError("bad batch")
    if donated:
        assert steps_of(tmp_path) == [0]
        assert "step 7, the last one, cannot be saved any more: w was donated" in caplog.text
        return
    assert steps_of(tmp_path) == [0, 7]
    with managed(tmp_path, "jax") as manager:
        start, again = manager.resume(jax_state())
    assert (start, again["rate"], again["loader"].count) == (8, 7.0, 7)
    assert np.array_equal(again["w"], np.arange(4.0) + 8)
    assert jax.random.key_data(again["key"]).tolist() == jax.random.key_data(state["key"]).tolist()


def test_a_state_whose_computation_failed_hides_no_error_of_the_training(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        def change(self) -> str:
            return ""

        def snapshot(self) -> Any:
            raise RuntimeError("INTERNAL: a computation failed")

    seen: list[str] = []
    try:
        with managed(tmp_path, "jax") as manager:
            manager.save(0, jax_state())
            manager._last.step, manager._last.held = 1, Fails()
            raise KeyError("of the training")
    except KeyError as error:
        seen.append(str(error))
    assert seen == ["'of the training'"]
    assert "step 1, the last one, cannot be saved: INTERNAL" in caplog.text
    assert steps_of(tmp_path) == [0]


def test_states_of_numpy_are_refused(one_host: Host, tmp_path: Path) -> None:
    with managed(tmp_path, "numpy") as manager, pytest.raises(InvalidArgumentError) as raised:
        manager.save(0, {"w": np.zeros(3)})
    assert "keep_last=True): expected a state of JAX or PyTorch" in str(raised.value)


def test_ranks_that_hold_one_step_save_it_together_and_wait_for_no_other(
    one_host: Host, tmp_path: Path
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with ending(
        subprocess.Popen(
            [*launcher, str(RANKS), str(tmp_path / "run")],
            env=one_host.environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    ) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert out.count("step 16, the last one, is being saved") == 2, out
    (secs,) = [float(line.split()[1]) for line in out.splitlines() if line.startswith("LEFT")]
    # The other rank waits in a collective until this one has ended.
    assert secs < 30, out
    # The agent commits what the last rank has left in RAM.
    wait_until(lambda: steps_of(tmp_path / "run")[-1] == 16)
