"""Tensors on devices, which a save borrows until the training passes a fence.

A stand-in device copies, since there is no GPU here: PyTorch's streams and events are not tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import holdfast  # noqa: E402
from holdfast import errors, save_decision_policy  # noqa: E402
from tests.adapt.stand_in_device import StandInDevice  # noqa: E402
from tests.hosts import Host  # noqa: E402
from tests.trainer.slots import wait_for_a_slot  # noqa: E402

EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)
SIDE = 300


@pytest.fixture
def gpu() -> Iterator[StandInDevice]:
    with StandInDevice().serving_torch() as made:
        yield made


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIDE, SIDE)
        self.last = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.norm = torch.nn.BatchNorm1d(SIDE)

    def forward(self, x: Any) -> Any:
        return self.norm(self.last(self.first(x)))


class Training:
    """A state, after one step; and what a save of it has to hold."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.state = {"model": self.net, "optimizer": self.optimizer, "ema": self.average}
        self.forward_and_backward()
        self.optimizer.step()

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randn(8, SIDE)).square().mean().backward()

    def copy(self) -> dict[str, Any]:
        found = {f"model/{n}": t.clone() for n, t in self.net.state_dict().items()}
        found |= {f"ema/{n}": t.clone() for n, t in self.average.state_dict().items()}
        for index, of in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/state/{index}/{n}": t.clone() for n, t in of.items()}
        return found


def check(manager: holdfast.CheckpointManager, step: int, expected: dict[str, Any]) -> None:
    manager.wait_until_finished()
    found = manager.restore(step)
    for name, tensor in expected.items():
        at = found
        for key in name.split("/"):
            at = at[int(key) if key.isdigit() else key]
        assert at.numpy().tobytes() == tensor.numpy().tobytes(), name


@contextlib.contextmanager
def opened(run: Path, framework: Any = "torch") -> Iterator[holdfast.CheckpointManager]:
    with holdfast.CheckpointManager(
        run, framework=framework, save_decision_policy=EVERY_STEP
    ) as manager:
        yield manager


def save_into_a_slot(manager: holdfast.CheckpointManager, step: int, state: Any) -> None:
    """Save once a slot is ready: without one the state is copied before the call returns."""
    wait_for_a_slot(manager)
    assert manager.save(step, state)


def hold(manager: holdfast.CheckpointManager, device: StandInDevice, training: Training) -> None:
    """Let the device copy nothing more, once the run has its slots."""
    if manager.latest_step() is None:
        assert manager.save(0, training.state)
        manager.wait_until_finished()
    device.let_run(0)


def once_let_run(device: StandInDevice, after_secs: float = 0.3) -> threading.Timer:
    timer = threading.Timer(after_secs, device.let_run, [None])
    timer.start()
    return timer


def test_forward_and_backward_run_beside_the_copy_and_a_step_waits_for_it(
    one_host: Host, tmp_path: Path, gpu: StandInDevice
) -> None:
    training = Training()
    with opened(tmp_path / "run") as manager:
        for step in range(1, 4):
            expected = training.copy()
            hold(manager, gpu, training)
            save_into_a_slot(manager, step, training.state)
            # Nothing has been copied by the device: buffers change, and gradients are computed.
            before = training.net.norm.running_mean.clone()
            training.forward_and_backward()
            assert not torch.equal(training.net.norm.running_mean, before)
            timer = once_let_run(gpu)
            training.optimizer.step()
            assert not timer.is_alive() or timer.finished.is_set(), "the step did not wait"
            timer.join()
            training.average.update_parameters(training.net)
            check(manager, step, expected)
        assert sum(gpu.copied_bytes.values()) > 3 * 2 * 4 * SIDE * SIDE


def test_the_slot_that_resume_prepares_is_page_locked_before_the_first_save(
    one_host: Host, tmp_path: Path, gpu: StandInDevice
) -> None:
    training = Training()
    with opened(tmp_path / "run") as manager:
        manager.resume(training.state)
        wait_for_a_slot(manager)
        # The second slot may be locked at any moment from here on.
        assert gpu.registered
        expected = training.copy()
        assert manager.save(0, training.state)
        training.optimizer.step()
        assert gpu.copied_bytes, "the first save was not copied by the device"
        check(manager, 0, expected)


def test_what_no_optimizer_updates_is_copied_before_save_returns(
    one_host: Host, tmp_path: Path, gpu: StandInDevice
) -> None:
    training = Training()
    with opened(tmp_path / "run") as manager:
        expected = training.copy()
        hold(manager, gpu, training)
        save_into_a_slot(manager, 1, training.state)
        for parameter in training.average.parameters():
            ctypes.memset(parameter.data_ptr(), 0x55, parameter.nbytes)
        training.net.norm.running_var.zero_()
        gpu.let_run(None)
        check(manager, 1, expected)


CHANGES: dict[str, Callable[[Training], Any]] = {
    "in place": lambda of: of.net.first.weight.detach().mul_(2),
    "load_state_dict": lambda of: of.net.load_state_dict(Net().state_dict()),
    "moments": lambda of: next(iter(of.optimizer.state.values()))["exp_avg"].zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_the_fence_fails_the_save_by_path_and_the_next_one_works(
    one_host: Host, tmp_path: Path, gpu: StandInDevice, change: str
) -> None:
    training = Training()
    with opened(tmp_path / "run") as manager:
        hold(manager, gpu, training)
        save_into_a_slot(manager, 1, training.state)
        CHANGES[change](training)
        gpu.let_run(None)
        with pytest.raises(
            errors.SaveFailedError, match=r"(model/first|optimizer/state/0).*call a fence"
        ):
            manager.wait_until_finished()
        expected = training.copy()
        assert manager.save(2, training.state)
        training.optimizer.step()
        check(manager, 2, expected)
        assert manager.all_steps() == [0, 2]


def change_by_address(of: Training) -> None:
    for parameter in of.net.parameters():
        ctypes.memset(parameter.data_ptr(), 0x55, parameter.nbytes)


UNSEEN: dict[str, Callable[[Training], Any]] = {
    "data": lambda of: [p.data.add_(1) for p in of.net.parameters()],
    "address": change_by_address,
    "step": lambda of: of.optimizer.step(),
    **CHANGES,
}


@pytest.mark.parametrize("change", UNSEEN)
def test_a_fence_of_the_programs_own_lets_it_change_tensors_in_any_way(
    one_host: Host, tmp_path: Path, gpu: StandInDevice, change: str
) -> None:
    training = Training()
    fence = holdfast.torch.Fence()
    with opened(tmp_path / "run", holdfast.torch.TorchFramework(fence=fence)) as manager:
        expected = training.copy()
        hold(manager, gpu, training)
        save_into_a_slot(manager, 1, training.state)
        timer = once_let_run(gpu)
        fence()
        assert sum(gpu.copied_bytes.values()) > 0
        UNSEEN[change](training)
        timer.join()
        check(manager, 1, expected)
        fence()


def test_steps_that_a_graph_may_replay_are_no_fence(
    one_host: Host, tmp_path: Path, gpu: StandInDevice
) -> None:
    training = Training()
    training.optimizer.param_groups[0]["capturable"] = True
    with opened(tmp_path / "run") as manager:
        hold(manager, gpu, training)
        gpu.let_run(None)
        expected = training.copy()
        save_into_a_slot(manager, 1, training.state)
        change_by_address(training)
        check(manager, 1, expected)
    assert not gpu.copied_bytes


def test_a_device_that_fails_before_the_fence_fails_its_save_alone(
    one_host: Host, tmp_path: Path, gpu: StandInDevice
) -> None:
    training = Training()
    with opened(tmp_path / "run") as manager:
        hold(manager, gpu, training)
        gpu.let_run(None)
        gpu.fails_at_copy = gpu.copy_count
        expected = training.copy()
        save_into_a_slot(manager, 1, training.state)
        training.optimizer.step()
        # If the training thread was the first to copy, it has secured the state another way.
        with contextlib.suppress(errors.SaveFailedError):
            check(manager, 1, expected)
        for step in (2, 3):
            expected = training.copy()
            save_into_a_slot(manager, step, training.state)
            training.optimizer.step()
            check(manager, step, expected)


def test_without_a_runtime_all_is_copied_before_save_returns_and_that_is_told_once(
    one_host: Host, tmp_path: Path, gpu: StandInDevice, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.refuses_to_register = True
    training = Training()
    with opened(tmp_path / "run") as manager:
        hold(manager, gpu, training)
        for step in range(1, 4):
            expected = training.copy()
            save_into_a_slot(manager, step, training.state)
            training.optimizer.step()
            check(manager, step, expected)
    assert caplog.text.count("states are copied from their devices before") == 1
