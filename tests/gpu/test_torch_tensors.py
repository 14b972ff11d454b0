"""States of PyTorch on a real GPU: what is saved is the state of its step, whatever runs beside.

`tests/adapt/test_torch_fences.py` has the same claims on a device that a test can hold up.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import holdfast  # noqa: E402
import holdfast.torch  # noqa: E402
from holdfast import save_decision_policy  # noqa: E402
from tests.hosts import Host  # noqa: E402
from tests.trainer.slots import wait_for_a_slot  # noqa: E402

EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)
SIDE = 2048
LONG = 1_000_000_000
"""Cycles of a GPU, about half a second."""

Content = dict[str, Any]

OPTIMIZERS = {
    "adamw": lambda of: torch.optim.AdamW(of, lr=0.01),
    "fused": lambda of: torch.optim.AdamW(of, lr=0.01, fused=True),
    "one by one": lambda of: torch.optim.AdamW(of, lr=0.01, foreach=False),
    "capturable": lambda of: torch.optim.AdamW(of, lr=0.01, capturable=True),
    "sgd": lambda of: torch.optim.SGD(of, lr=0.01, momentum=0.9),
}


class Training:
    """A state of 150 MB on the GPU, after one step."""

    def __init__(self, optimizer: str = "adamw", dtype: Any = torch.float32) -> None:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(3)]
        self.net = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(SIDE)).to("cuda", dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.state = {"model": self.net, "optimizer": self.optimizer, "ema": self.average}
        self.batch = torch.randn(64, SIDE, device="cuda", dtype=dtype)
        self.step()

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.batch).square().mean().backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()
        self.average.update_parameters(self.net)

    def copy(self) -> Content:
        """Return a copy of all that a save has to hold, made on the stream of the training."""
        found = {f"model/{n}": t.clone() for n, t in self.net.state_dict().items()}
        found |= {f"ema/{n}": t.clone() for n, t in self.average.state_dict().items()}
        for index, of in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/state/{index}/{n}": t.clone() for n, t in of.items()}
        return found


def bits(tensor: Any) -> Any:
    """Return the bytes of a tensor, on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def check(manager: holdfast.CheckpointManager, step: int, expected: Content) -> None:
    manager.wait_until_finished()
    found = manager.restore(step)
    for name, tensor in expected.items():
        at = found
        for key in name.split("/"):
            at = at[int(key) if key.isdigit() else key]
        assert torch.equal(bits(at), bits(tensor)), f"step {step}: {name}"


@contextlib.contextmanager
def opened(run: Path, framework: Any = "torch") -> Iterator[holdfast.CheckpointManager]:
    with holdfast.CheckpointManager(
        run, framework=framework, save_decision_policy=EVERY_STEP
    ) as manager:
        yield manager


@pytest.fixture
def copied(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Holdfast logs, with the copies that a device has made."""
    with caplog.at_level(logging.DEBUG, logger="holdfast"):
        yield caplog


def count_of_copies(log: pytest.LogCaptureFixture) -> int:
    return log.text.count("devices copied")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_step_is_saved_as_it_was_while_the_training_goes_on(
    one_host: Host, tmp_path: Path, copied: pytest.LogCaptureFixture, kind: str
) -> None:
    training = Training(kind)
    expected = {}
    with opened(tmp_path / "run") as manager:
        for step in range(8):
            content = training.copy()
            # A save that comes too soon after the one before is not taken.
            if manager.save(step, training.state):
                expected[step] = content
            if step % 2:
                wait_for_a_slot(manager)
            training.step()
        manager.wait_until_finished()
        for step in manager.all_steps():
            check(manager, step, expected[step])
        assert {*manager.all_steps()} & {6, 7}
    assert bool(count_of_copies(copied)) == (kind != "capturable")
    assert "states are copied from their devices before" not in copied.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_elements_are_saved_as_they_were(one_host: Host, tmp_path: Path, dtype: Any) -> None:
    training = Training(dtype=dtype)
    with opened(tmp_path / "run") as manager:
        for step in range(3):
            expected = training.copy()
            assert manager.save(step, training.state)
            wait_for_a_slot(manager)
            training.step()
        check(manager, 2, expected)


def test_save_does_not_wait_for_work_that_is_queued_and_saves_its_outcome(
    one_host: Host, tmp_path: Path, copied: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with opened(tmp_path / "run") as manager:
        for step in range(2):
            assert manager.save(step, training.state)
            wait_for_a_slot(manager)
            training.step()
        del training.state["ema"]  # what no optimizer updates is copied by `save` itself
        assert manager.save(2, {"model": training.net[0], "optimizer": training.optimizer})
        manager.wait_until_finished()
        wait_for_a_slot(manager)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        training.forward_and_backward()
        training.optimizer.step()
        expected = training.net[0].weight.detach().clone()
        asked = time.monotonic()
        assert manager.save(3, {"model": training.net[0], "optimizer": training.optimizer})
        blocked_secs = time.monotonic() - asked
        torch.cuda.synchronize()
        waited_secs = time.monotonic() - asked
        training.optimizer.step()
        check(manager, 3, {"model/weight": expected})
    assert waited_secs > 0.1, "the device had computed it already"
    assert blocked_secs < waited_secs / 2
    assert count_of_copies(copied)


def test_memory_of_tensors_that_the_program_drops_is_not_used_before_it_is_copied(
    one_host: Host, tmp_path: Path
) -> None:
    with opened(tmp_path / "run") as manager:
        for step in range(3):
            training = Training()
            expected = training.copy()
            sizes = [parameter.shape for parameter in training.net.parameters()]
            assert manager.save(step, training.state)
            wait_for_a_slot(manager)
            del training
            filled = [torch.full(size, float("nan"), device="cuda") for size in 3 * sizes]
            check(manager, step, expected)
            del filled


def test_a_save_takes_no_memory_of_the_device_for_what_optimizers_update(
    one_host: Host, tmp_path: Path
) -> None:
    training = Training()
    state = {"model": training.net, "optimizer": training.optimizer}
    with opened(tmp_path / "run") as manager:
        for step in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            assert manager.save(step, state)
            manager.wait_until_finished()
            wait_for_a_slot(manager)
            assert torch.cuda.max_memory_allocated() - before < 1_000_000


def test_a_fence_of_the_programs_own_guards_a_graph_that_is_replayed(
    one_host: Host, tmp_path: Path, copied: pytest.LogCaptureFixture
) -> None:
    weights = torch.nn.Parameter(torch.ones(SIDE, SIDE, device="cuda"))
    optimizer = torch.optim.AdamW([weights], lr=0.01, capturable=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    fence = holdfast.torch.Fence()
    state = {"weights": weights, "optimizer": optimizer}
    with opened(tmp_path / "run", holdfast.torch.TorchFramework(fence=fence)) as manager:
        expected = {}
        for step in range(5):
            fence()
            graph.replay()
            expected[step] = weights.detach().clone()
            assert manager.save(step, state)
            wait_for_a_slot(manager)
        manager.wait_until_finished()
        for step, of in expected.items():
            if step in manager.all_steps():
                check(manager, step, {"weights": of})
    assert count_of_copies(copied)


def test_without_the_bindings_all_is_right_and_that_is_told_once(
    one_host: Host,
    tmp_path: Path,
    copied: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime"):
        monkeypatch.setitem(sys.modules, name, None)
    training = Training()
    with opened(tmp_path / "run") as manager:
        for step in range(3):
            expected = training.copy()
            assert manager.save(step, training.state)
            wait_for_a_slot(manager)
            training.step()
        check(manager, 2, expected)
    assert copied.text.count("states are copied from their devices before") == 1
    assert not count_of_copies(copied)


def test_tensors_on_a_gpu_are_filled_and_stay_the_same_objects(
    one_host: Host, tmp_path: Path
) -> None:
    saved, filled = Training(), Training()
    filled.step()
    with opened(tmp_path / "run") as manager:
        assert manager.save(7, saved.state)
        expected = saved.copy()
        manager.wait_until_finished()
    addresses = [parameter.data_ptr() for parameter in filled.net.parameters()]
    with opened(tmp_path / "run") as manager:
        start, _ = manager.resume(filled.state)
    assert start == 8
    found = filled.copy()
    assert all(torch.equal(bits(found[name]), bits(of)) for name, of in expected.items())
    assert all(found[name].device == of.device for name, of in expected.items())
    assert [parameter.data_ptr() for parameter in filled.net.parameters()] == addresses


def test_tensors_of_any_layout_on_a_gpu_are_filled(one_host: Host, tmp_path: Path) -> None:
    large = torch.randn(3000, 5001, device="cuda")
    state = {
        "large": large,
        "transposed": torch.randn(300, 200, device="cuda").t(),
        "every second": torch.randn(1000, 10, device="cuda")[::2],
        "empty": torch.empty(0, 4, device="cuda"),
        "scalar": torch.tensor(3.5, device="cuda"),
        "conj": torch.randn(7, dtype=torch.complex64, device="cuda").conj(),
        "bool": torch.rand(100, device="cuda") > 0.5,
        "on the host": torch.randn(100),
        "float8": torch.randn(64, device="cuda").to(torch.float8_e4m3fn),
    }
    expected = {name: tensor.clone() for name, tensor in state.items()}
    path = tmp_path / "saved"
    holdfast.save(path, state)
    for tensor in state.values():
        tensor.detach().copy_(torch.zeros_like(tensor))
    found = holdfast.load(path, like=state)
    for name, tensor in expected.items():
        assert found[name] is state[name]
        assert torch.equal(bits(state[name].resolve_conj()), bits(tensor.resolve_conj())), name
        assert state[name].stride() == tensor.stride() or name != "large"


def test_a_fill_waits_for_work_that_still_reads_the_tensor(one_host: Host, tmp_path: Path) -> None:
    weights = torch.ones(SIDE, SIDE, device="cuda")
    holdfast.save(tmp_path / "saved", {"weights": weights})
    weights.fill_(2.0)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    read = weights * 1.0
    holdfast.load(tmp_path / "saved", like={"weights": weights})
    assert torch.equal(read, torch.full_like(read, 2.0))
    assert torch.equal(weights, torch.ones_like(weights))
