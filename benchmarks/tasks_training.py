"""Training with and without checkpoints: what a checkpoint costs, and how often one is durable."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import states, watching
from benchmarks.memory import PeakMemory
from benchmarks.systems import SYSTEMS, State, System

WARM_UP_STEPS = 3
BATCH_ROWS = 128


def train(
    *,
    system: str,
    directory: str,
    kind: str,
    size_gb: float,
    matmuls: int,
    steps: int,
    policy: dict[str, Any],
) -> dict[str, Any]:
    """Trains `steps` steps without the system and then as many with it."""
    folder = Path(directory)
    state = states.make(kind, size_gb)
    step_function = states.train_step(matmuls) if kind == "adam" else states.any_step()
    batch = jnp.ones((BATCH_ROWS, states.SIDE))
    state, _ = _run(step_function, state, batch, range(WARM_UP_STEPS), None)
    state, without = _run(step_function, state, batch, range(steps), None)
    opened = SYSTEMS[system](folder, **policy)
    try:
        state = opened.resume(state)
        # The first checkpoints make files and pages; what comes after them is what is measured.
        state, _ = _run(step_function, state, batch, range(steps // 4), opened)
        with watching.watch(system, folder) as watcher:
            began = steps // 4
            state, with_saves = _run(
                step_function, state, batch, range(began, began + steps), opened
            )
        opened.wait()
    finally:
        opened.close()
    seen = watcher.times
    return {
        "size_bytes": states.size_bytes(state),
        "steps": steps,
        "step_without_secs": statistics.mean(without),
        "step_with_secs": statistics.mean(with_saves),
        "step_without_p50_secs": statistics.median(without),
        "step_with_p50_secs": statistics.median(with_saves),
        "checkpoints": len(seen),
        "interval_p50_secs": _p50_interval(seen),
    }


def peak_memory(
    *, system: str, directory: str, kind: str, size_gb: float, matmuls: int, steps: int
) -> dict[str, Any]:
    """The most memory that checkpoints take, from the opening on; looking at it costs time."""
    folder = Path(directory)
    state = states.make(kind, size_gb)
    step_function = states.train_step(matmuls) if kind == "adam" else states.any_step()
    batch = jnp.ones((BATCH_ROWS, states.SIDE))
    state, _ = _run(step_function, state, batch, range(WARM_UP_STEPS), None)
    before = PeakMemory.of_now(folder)
    opened = SYSTEMS[system](folder)
    try:
        with PeakMemory(before) as memory:
            state = opened.resume(state)
            state, _ = _run(step_function, state, batch, range(steps), opened)
            opened.wait()
    finally:
        opened.close()
    return {"size_bytes": states.size_bytes(state), "over_bytes": memory.peak_bytes}


def _run(
    step_function: Callable[[State, jax.Array], tuple[State, jax.Array]],
    state: State,
    batch: jax.Array,
    steps: range,
    system: System | None,
) -> tuple[State, list[float]]:
    """Runs `steps`; each ends when its loss is known, as a loop that logs its loss does."""
    secs = []
    for step in steps:
        started = time.perf_counter()
        state, loss = step_function(state, batch)
        loss.block_until_ready()
        if system is not None:
            system.save(step, state)
        secs.append(time.perf_counter() - started)
    return state, secs


def _p50_interval(times: list[float]) -> float | None:
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else None
