"""Training with and without checkpoints: what a checkpoint costs, and how often one is durable."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import psutil

from benchmarks import states, watching
from benchmarks.memory import PeakMemory, agents
from benchmarks.systems import SYSTEMS, System

WARM_UP_STEPS = 3
BATCH_ROWS = 128
FIRST_PERIODS = 2
STEPS_MAX = 4000


class Step(NamedTuple):
    """One step of training, by `time.time`; whether a checkpoint of it was taken."""

    began: float
    ended: float
    is_taken: bool

    @property
    def secs(self) -> float:
        return self.ended - self.began


class Training:
    """A state in training, warmed up."""

    def __init__(self, kind: str, size_gb: float, matmuls: int) -> None:
        self.state = states.make(kind, size_gb)
        self.size_bytes = states.size_bytes(self.state)
        self._step = states.train_step(matmuls) if kind == "adam" else states.any_step()
        self._batch = jnp.ones((BATCH_ROWS, states.SIDE))
        self._number = 0
        self.run(WARM_UP_STEPS)

    def step(self, system: System | None = None) -> Step:
        """One step; it ends when its loss is known, as in a loop that logs its loss."""
        began = time.time()
        self.state, loss = self._step(self.state, self._batch)
        loss.block_until_ready()
        is_taken = system is not None and system.save(self._number, self.state)
        self._number += 1
        return Step(began, time.time(), is_taken)

    def run(self, steps: int, system: System | None = None) -> list[Step]:
        """Trains so many steps."""
        return [self.step(system) for _ in range(steps)]

    def run_periods(self, system: System, periods: int, steps_min: int = 0) -> list[Step]:
        """Trains until `periods` checkpoints were taken at least; the last step's was taken."""
        steps: list[Step] = []
        while len(steps) < STEPS_MAX:
            steps.append(self.step(system))
            periods -= steps[-1].is_taken
            if periods <= 0 and steps[-1].is_taken and len(steps) >= steps_min:
                return steps
        raise RuntimeError(f"{periods} checkpoints were still to come after {STEPS_MAX} steps")


def train(
    *,
    system: str,
    directory: str,
    kind: str,
    size_gb: float,
    matmuls: int,
    steps: int,
    periods: int,
) -> dict[str, Any]:
    """Trains `steps` steps without the system and then at least as many with it.

    With it, it trains over whole periods between checkpoints: from the step of one to the step of
    another, `periods` of them at least.
    """
    folder = Path(directory)
    training = Training(kind, size_gb, matmuls)
    without = training.run(steps)
    opened = SYSTEMS[system](folder)
    try:
        training.state = opened.resume(training.state)
        # The first checkpoints make files and pages; what comes after them is what is measured.
        training.run_periods(opened, FIRST_PERIODS + 1, steps_min=steps // 4)
        helpers = agents(folder)
        with watching.watch(system, folder) as watcher:
            spent = _processor_secs(helpers)
            with_saves = training.run_periods(opened, periods, steps_min=steps)
            spent = _processor_secs(helpers) - spent
        opened.wait()
    finally:
        opened.close()
    checkpoints = sum(step.is_taken for step in with_saves)
    return {
        "size_bytes": training.size_bytes,
        "steps": len(with_saves),
        "step_without_secs": statistics.mean(step.secs for step in without),
        "step_with_secs": statistics.mean(step.secs for step in with_saves),
        "step_without_p50_secs": statistics.median(step.secs for step in without),
        "step_with_p50_secs": statistics.median(step.secs for step in with_saves),
        "checkpoints": checkpoints,
        "interval_p50_secs": _p50_interval(watcher.times),
        "agent_processor_secs_per_checkpoint": spent / checkpoints,
    }


def budget(
    *, directory: str, size_gb: float, matmuls: int, share: float, periods: int
) -> dict[str, Any]:
    """Trains where checkpoints may cost `share` of the time, over whole periods between them."""
    folder = Path(directory)
    training = Training("adam", size_gb, matmuls)
    opened = SYSTEMS["holdfast"](folder, max_overhead=share)
    try:
        training.state = opened.resume(training.state)
        with watching.watch("holdfast", folder) as watcher:
            # The first makes files and pages, and the next comes as late as that was dear.
            steps = training.run_periods(opened, FIRST_PERIODS + periods + 1)
            opened.wait()
    finally:
        opened.close()
    return {"size_bytes": training.size_bytes, **shares(steps, watcher.times)}


def shares(steps: list[Step], durable: list[float]) -> dict[str, Any]:
    """What the steps took beyond the quiet ones among them, of what they took in all.

    A step is quiet where nothing was being saved, from the step of a save to when it was durable.
    """
    taken = [i for i, step in enumerate(steps) if step.is_taken]
    window = range(taken[FIRST_PERIODS] + 1, taken[-1] + 1)
    saving = [(steps[i].began, end) for i, end in zip(taken, durable, strict=True)]
    secs = [steps[i].secs for i in window]
    quiet = [
        steps[i].secs
        for i in window
        if not any(steps[i].began < end and steps[i].ended > start for start, end in saving)
    ]
    return {
        "share": 1 - statistics.mean(quiet) / statistics.mean(secs),
        "steps": len(secs),
        "quiet_steps": len(quiet),
        "checkpoints": len(taken) - FIRST_PERIODS - 1,
        "step_secs": statistics.mean(secs),
        "quiet_step_secs": statistics.mean(quiet),
        "first_interval_secs": steps[taken[1]].ended - steps[taken[0]].ended,
    }


def peak_memory(
    *, system: str, directory: str, kind: str, size_gb: float, matmuls: int, steps: int
) -> dict[str, Any]:
    """The most memory that checkpoints take, from the opening on; looking at it costs time."""
    folder = Path(directory)
    training = Training(kind, size_gb, matmuls)
    before = PeakMemory.of_now(folder)
    opened = SYSTEMS[system](folder)
    try:
        with PeakMemory(before) as memory:
            training.state = opened.resume(training.state)
            training.run(steps, opened)
            opened.wait()
    finally:
        opened.close()
    return {"size_bytes": training.size_bytes, "over_bytes": memory.peak_bytes}


def _processor_secs(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(found.user + found.system for found in times)


def _p50_interval(times: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times))
