"""One checkpoint at a time: how long until it is safe, and until it is durable."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import limits as machine
from benchmarks import states
from benchmarks.systems import SYSTEMS, committed

WARM_UP = 2
"""Checkpoints before those that are measured: each of the two slots gets its pages in one."""


def limits(*, size_gb: float, disk: str, ram: str) -> dict[str, Any]:
    """The machine's rates, bytes a second."""
    return machine.rates(int(size_gb * states.GB), Path(disk), Path(ram))


def save(*, system: str, directory: str, kind: str, size_gb: float, count: int) -> dict[str, Any]:
    """Takes `count` checkpoints one after another, once both slots have their pages.

    A checkpoint is durable when it gets the name that says so; the deletion of an earlier one,
    which the next save waits for, comes after that.
    """
    state = states.make(kind, size_gb)
    step_function = states.any_step()
    batch = jnp.ones(1)
    opened = SYSTEMS[system](Path(directory))
    blocked, safe, durable = [], [], []
    try:
        for step in range(WARM_UP + count):
            state, _ = step_function(state, batch)
            jax.block_until_ready(state)
            began, clock = time.time(), time.perf_counter()
            opened.save_now(step, state)
            blocked.append(time.perf_counter() - clock)
            opened.wait()
            durable.append(committed(system, Path(directory))[step] - began)
            safe.append(opened.sealed_at(step) - began)
    finally:
        opened.close()
    return {
        "size_bytes": states.size_bytes(state),
        "blocked_secs": blocked[WARM_UP:],
        "safe_secs": safe[WARM_UP:],
        "durable_secs": durable[WARM_UP:],
    }


def not_due(*, directory: str, calls: int) -> dict[str, Any]:
    """Seconds that one call of `save` takes when nothing is due."""
    opened = SYSTEMS["holdfast"](Path(directory), minimum_interval_secs=3600.0)
    state = {"w": jnp.ones(8)}
    try:
        opened.save_now(0, state)
        opened.wait()
        started = time.perf_counter()
        for step in range(1, calls + 1):
            opened.save(step, state)
        secs = (time.perf_counter() - started) / calls
    finally:
        opened.close()
    return {"call_secs": secs}


def frozen(
    *, directory: str, size_gb: float, share: float, count: int, way: str = "same"
) -> dict[str, Any]:
    """Checkpoints of a state of which `share` never changes, after those that warm up.

    `way` tells how it stays: `same` are the same array objects, `passed` come out of a jitted step
    that took them, donated, as other objects.
    """
    base = states.make("adam", size_gb * share)
    tuned = states.make("adam", size_gb * (1 - share), seed=1)
    step_function = states.any_step()
    pass_through = jax.jit(lambda arrays: arrays, donate_argnums=0)
    opened = SYSTEMS["holdfast"](Path(directory))
    secs, written = [], []
    seen: set[tuple[int, int]] = set()
    try:
        for step in range(WARM_UP + count):
            tuned, _ = step_function(tuned, jnp.ones(1))
            if way == "passed":
                base = pass_through(base)
            jax.block_until_ready((base, tuned))
            started = time.time()
            opened.save_now(step, {"base": base, "tuned": tuned})
            opened.wait()
            secs.append(committed("holdfast", Path(directory))[step] - started)
            written.append(_new_image_bytes(Path(directory), step, seen))
    finally:
        opened.close()
    return {"secs": secs[WARM_UP:], "written_bytes": written[WARM_UP:], "first_bytes": written[0]}


def _new_image_bytes(directory: Path, step: int, seen: set[tuple[int, int]]) -> int:
    """The bytes of the images of `step` whose files are not among `seen`, which grows by them.

    The number of a file that was deleted is given to another one: the time of writing tells them
    apart, and is no other under another name.
    """
    total = 0
    for folder in (directory / "checkpoints").glob(f"{step:09d}.*"):
        for path in folder.glob("image-*"):
            status = path.stat()
            file = status.st_ino, status.st_mtime_ns
            if file not in seen:
                seen.add(file)
                total += status.st_blocks * 512
    return total
