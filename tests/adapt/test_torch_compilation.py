"""PyTorch's compile times are reported, also of backward passes, and a compiled step has none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.adapt.torch.state import TorchFramework
from holdfast.observe.reports.goodput import report_run
from holdfast.trainer.opening.run_access import events_of, read_only
from tests.hosts import Host, await_events


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(backend: str = "eager") -> Any:
    @torch.compile(backend=backend)
    def step(x: Any) -> Any:
        for _ in range(30):
            x = torch.sin(x) @ x
        return x.sum()

    return step


def test_a_compilation_is_reported_once_and_a_compiled_step_is_not() -> None:
    reported: list[float] = []
    framework, step, state = TorchFramework(), compiled(), torch.ones(3, 3)
    stop = framework.watch_compilations(reported.append)
    began_secs = time.monotonic()
    step(state)
    whole_secs = time.monotonic() - began_secs
    assert 0.2 * whole_secs < sum(reported) <= whole_secs
    count = len(reported)
    step(state)
    assert len(reported) == count
    # The callbacks are forgotten, and registered with the next state.
    torch.compiler.reset()
    framework.snapshot({"w": state}).release()
    step(state)
    assert len(reported) > count
    count = len(reported)
    stop()
    stop()
    torch.compiler.reset()
    framework.snapshot({"w": state}).release()
    step(state)
    assert len(reported) == count


def test_a_backward_pass_that_is_compiled_later_is_reported() -> None:
    reported: list[float] = []
    step, state = compiled("aot_eager"), torch.ones(3, 3, requires_grad=True)
    stop = TorchFramework().watch_compilations(reported.append)
    try:
        loss = step(state)
        count = len(reported)
        loss.backward()
        assert len(reported) > count
    finally:
        stop()


def test_another_thread_does_not_hold_up_the_training() -> None:
    reported: list[float] = []
    stop = TorchFramework().watch_compilations(reported.append)
    try:
        other = threading.Thread(target=compiled(), args=(torch.ones(3, 3),))
        other.start()
        other.join()
    finally:
        stop()
    assert reported == []


def test_a_recompilation_is_a_category_of_the_report(one_host: Host, tmp_path: Path) -> None:
    step = compiled()
    with holdfast.CheckpointManager(tmp_path / "run", framework="torch") as manager:
        for number in range(6):
            # Another number of axes is another program.
            step(torch.ones(3, 3) if number < 3 else torch.ones(2, 3, 3))
            manager.save(number, {"w": torch.ones(3)})
        manager.finish(5, {"w": torch.ones(3)})
    await_events(tmp_path / "run", "trainer_left", count=1)
    report = report_run("run", events_of(read_only(tmp_path / "run")).read())
    assert report.categories["compiling"] > 0
    assert "compilation" not in report.waiting
