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
BUDGET_STEPS_MAX = 4000


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
        self.run(range(WARM_UP_STEPS))

    def step(self, number: int, system: System | None = None) -> Step:
        """One step; it ends when its loss is known, as in a loop that logs its loss."""
        began = time.time()
        self.state, loss = self._step(self.state, self._batch)
        loss.block_until_ready()
        is_taken = system is not None and system.save(number, self.state)
        return Step(began, time.time(), is_taken)

    def run(self, steps: range, system: System | None = None) -> list[float]:
        """How long each of the steps took, in seconds."""
        return [self.step(number, system).secs for number in steps]


def train(
    *,
    system: str,
    directory: str,
    kind: str,
    size_gb: float,
    matmuls: int,
    steps: int,
) -> dict[str, Any]:
    """Trains `steps` steps without the system and then as many with it."""
    folder = Path(directory)
    training = Training(kind, size_gb, matmuls)
    without = training.run(range(steps))
    opened = SYSTEMS[system](folder)
    try:
        training.state = opened.resume(training.state)
        # The first checkpoints make files and pages; what comes after them is what is measured.
        training.run(range(steps // 4), opened)
        helpers = agents(folder)
        with watching.watch(system, folder) as watcher:
            began, spent = steps // 4, _processor_secs(helpers)
            with_saves = training.run(range(began, began + steps), opened)
            spent = _processor_secs(helpers) - spent
        opened.wait()
    finally:
        opened.close()
    seen = watcher.times
    if len(seen) < 2:
        raise RuntimeError(
            f"{system} made {len(seen)} checkpoints of {kind} durable in {steps} steps, and an "
            "interval needs two: the steps are too few, or too short at this scale"
        )
    return {
        "size_bytes": training.size_bytes,
        "steps": steps,
        "step_without_secs": statistics.mean(without),
        "step_with_secs": statistics.mean(with_saves),
        "step_without_p50_secs": statistics.median(without),
        "step_with_p50_secs": statistics.median(with_saves),
        "checkpoints": len(seen),
        "interval_p50_secs": _p50_interval(seen),
        "agent_processor_secs_per_checkpoint": spent / len(seen),
    }


def budget(
    *, directory: str, size_gb: float, matmuls: int, share: float, periods: int
) -> dict[str, Any]:
    """Trains where checkpoints may cost `share` of the time, over whole periods between them."""
    folder = Path(directory)
    training = Training("adam", size_gb, matmuls)
    opened = SYSTEMS["holdfast"](folder, max_overhead=share)
    steps: list[Step] = []
    # The first makes files and pages, and the next comes as late as that was dear.
    left = FIRST_PERIODS + periods + 1
    try:
        training.state = opened.resume(training.state)
        with watching.watch("holdfast", folder) as watcher:
            while left and len(steps) < BUDGET_STEPS_MAX:
                steps.append(training.step(len(steps), opened))
                left -= steps[-1].is_taken
            opened.wait()
    finally:
        opened.close()
    if left:
        raise RuntimeError(f"{left} checkpoints were still to come after {len(steps)} steps")
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
            training.run(range(steps), opened)
            opened.wait()
    finally:
        opened.close()
    return {"size_bytes": training.size_bytes, "over_bytes": memory.peak_bytes}


def _processor_secs(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(found.user + found.system for found in times)


def _p50_interval(times: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times))
