"""PyTorch: what checkpoints cost the training, how soon they are durable, and restores."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import limits as machine
from benchmarks import torch_states
from benchmarks.memory import PeakMemory
from benchmarks.torch_states import TorchState
from benchmarks.torch_systems import TORCH_SYSTEMS, TorchSystem

WARM_UP = 2
"""Checkpoints before those that are measured: they make files, pages and processes."""
WARM_UP_STEPS = 3
STEPS_MAX = 4000


class Step(NamedTuple):
    """What one step took, the call of `save` included; whether a checkpoint of it was taken."""

    secs: float
    is_taken: bool


class Training:
    """A state in training, warmed up."""

    def __init__(self, kind: str, size_gb: float) -> None:
        self.state: TorchState = torch_states.make(kind, size_gb)
        self._number = 0
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self, system: TorchSystem | None = None) -> Step:
        """One step."""
        started = time.perf_counter()
        self.state.step(contextlib.nullcontext() if system is None else system.guard())
        is_taken = system is not None and system.save(self._number, self.state)
        self._number += 1
        return Step(time.perf_counter() - started, is_taken)

    def run_periods(self, system: TorchSystem, periods: int, steps_min: int) -> list[Step]:
        """Trains until `periods` checkpoints were taken at least; the last step's was taken."""
        steps: list[Step] = []
        while len(steps) < STEPS_MAX:
            steps.append(self.step(system))
            periods -= steps[-1].is_taken
            if periods <= 0 and steps[-1].is_taken and len(steps) >= steps_min:
                return steps
        raise RuntimeError(f"{periods} checkpoints were still to come after {STEPS_MAX} steps")


def torch_train(
    *, system: str, directory: str, kind: str, size_gb: float, steps: int, periods: int
) -> dict[str, Any]:
    """Trains `steps` steps without the system, and at least as many with it, over whole periods."""
    return trained(lambda: TORCH_SYSTEMS[system](Path(directory)), kind, size_gb, steps, periods)


def trained(
    open_system: Callable[[], TorchSystem],
    kind: str,
    size_gb: float,
    steps: int,
    periods: int,
    processor_secs: Callable[[], float] = lambda: 0.0,
) -> dict[str, Any]:
    """The same for a system that `open_system` opens; `processor_secs` is of its own processes."""
    training = Training(kind, size_gb)
    without = [training.step().secs for _ in range(steps)]
    opened = open_system()
    try:
        training.run_periods(opened, WARM_UP + 1, steps // 4)
        spent = processor_secs()
        found = training.run_periods(opened, periods, steps)
        opened.wait()
        spent = processor_secs() - spent
    finally:
        opened.close()
    return {
        "size_bytes": torch_states.size_bytes(training.state),
        "steps": len(found),
        "step_without_secs": statistics.mean(without),
        "step_with_secs": statistics.mean(step.secs for step in found),
        "step_without_p50_secs": statistics.median(without),
        "step_with_p50_secs": statistics.median(step.secs for step in found),
        "checkpoints": sum(step.is_taken for step in found),
        "processor_secs": spent,
    }


def torch_peak_memory(
    *, system: str, directory: str, kind: str, size_gb: float, periods: int
) -> dict[str, Any]:
    """The most memory that checkpoints take, with helper processes, from the opening on."""
    training = Training(kind, size_gb)
    folder = Path(directory)
    before = PeakMemory.of_now(folder)
    # A step has gradients and an optimizer's own memory, with a checkpointer and without.
    with PeakMemory(before) as of_steps:
        for _ in range(WARM_UP_STEPS):
            training.step()
    opened = TORCH_SYSTEMS[system](folder)
    try:
        # Holdfast's slots are counted where they lie, and its agent by its name.
        with PeakMemory(before, with_children=system != "holdfast") as memory:
            training.run_periods(opened, WARM_UP + periods, 0)
            opened.wait()
    finally:
        opened.close()
    return {
        "size_bytes": torch_states.size_bytes(training.state),
        "over_bytes": memory.peak_bytes - of_steps.peak_bytes,
    }


def torch_save(
    *, system: str, directory: str, kind: str, size_gb: float, count: int
) -> dict[str, Any]:
    """Takes `count` checkpoints one after another, after those that warm up."""
    training = Training(kind, size_gb)
    opened = TORCH_SYSTEMS[system](Path(directory))
    blocked, durable = [], []
    try:
        for step in range(WARM_UP + count):
            training.state.step(opened.guard())
            started = time.time()
            opened.save_now(step, training.state)
            blocked.append(time.time() - started)
            opened.wait()
            durable.append(opened.durable_at(step) - started)
    finally:
        opened.close()
    return {
        "size_bytes": torch_states.size_bytes(training.state),
        "blocked_secs": blocked[WARM_UP:],
        "durable_secs": durable[WARM_UP:],
    }


def torch_fill(*, system: str, directory: str, kind: str, size_gb: float) -> None:
    """Saves one state durably, prints its fingerprint, and is killed with SIGKILL."""
    state = torch_states.make(kind, size_gb)
    opened = TORCH_SYSTEMS[system](Path(directory))
    opened.save_now(0, state)
    opened.wait()
    print(f'{{"fingerprint": "{torch_states.fingerprint(state)}"}}')
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def torch_restore(
    *, system: str, directory: str, kind: str, size_gb: float, cold: bool
) -> dict[str, Any]:
    """Restores in a fresh process, into a state of other values whose memory is there.

    `cold`: the page cache was emptied before.
    """
    state = torch_states.make(kind, size_gb, seed=1)
    emptied = machine.drop_caches() if cold else False
    opened = TORCH_SYSTEMS[system](Path(directory))
    try:
        started = time.perf_counter()
        opened.restore(state)
        secs = time.perf_counter() - started
    finally:
        opened.close()
    return {"secs": secs, "fingerprint": torch_states.fingerprint(state), "emptied": emptied}
