"""What the first checkpoints of a run cost, whose slots have no pages yet."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from benchmarks import limits as machine
from benchmarks import states
from benchmarks.memory import agents
from benchmarks.systems import SYSTEMS
from benchmarks.tasks_training import Training

CHECKPOINTS = 6
NEW_SLOTS = 2
"""Two slots take turns: the first two checkpoints are those into new pages."""


def first_checkpoints(*, directory: str, size_gb: float) -> dict[str, Any]:
    """Checkpoints one after another, with a step before each, from the opening on.

    Returns:
        `core_secs`: processor time of the trainer and its agent, one figure per checkpoint; that
        of the first has the opening and the agent's start in it. `new_pages_core_secs`: what a
        plain program uses for as much new memory as a slot has.
    """
    folder = Path(directory)
    state, step_function = states.make("large", size_gb), states.any_step()
    state, _ = step_function(state, jnp.ones(1))
    jax.block_until_ready(state)
    new_pages = machine.new_pages_core_secs(states.size_bytes(state), Path("/dev/shm"))
    spent = [_core_secs(folder)]
    blocked = []
    opened = SYSTEMS["holdfast"](folder)
    try:
        state = opened.resume(state)
        for step in range(CHECKPOINTS):
            state, _ = step_function(state, jnp.ones(1))
            jax.block_until_ready(state)
            began = time.perf_counter()
            opened.save_now(step, state)
            blocked.append(time.perf_counter() - began)
            opened.wait()
            spent.append(_core_secs(folder))
    finally:
        opened.close()
    return {
        "size_bytes": states.size_bytes(state),
        "core_secs": [after - before for before, after in itertools.pairwise(spent)],
        "blocked_secs": blocked,
        "new_pages_core_secs": new_pages,
    }


def first_minute(*, directory: str, size_gb: float, secs: float) -> dict[str, Any]:
    """Trains for `secs` seconds from the opening on, saving continuously.

    Returns:
        `step_secs` of every step, `save` and what it waited for included, and `opened_secs`, the
        opening's own; `step_without_secs`: the median of the steps before.
    """
    training = Training("large", size_gb, 1)
    without = [step.secs for step in training.run(20)]
    began = time.perf_counter()
    opened = SYSTEMS["holdfast"](Path(directory))
    try:
        training.state = opened.resume(training.state)
        opened_secs = time.perf_counter() - began
        steps = []
        while time.perf_counter() - began < secs:
            steps.append(training.step(opened))
        opened.wait()
    finally:
        opened.close()
    return {
        "size_bytes": training.size_bytes,
        "opened_secs": opened_secs,
        "step_without_secs": statistics.median(without),
        "step_secs": [step.secs for step in steps],
        "checkpoints": sum(step.is_taken for step in steps),
    }


def _core_secs(folder: Path) -> float:
    times = [process.cpu_times() for process in (psutil.Process(), *agents(folder))]
    return sum(found.user + found.system for found in times)
