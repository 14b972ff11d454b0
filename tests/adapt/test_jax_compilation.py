"""JAX's compile times are reported once each, and a step that compiles nothing has no event."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import holdfast
from holdfast.adapt.jax.compilation import CompilationTimes, watch_compilations
from holdfast.observe.reports.goodput import report_run
from holdfast.trainer.opening.run_access import events_of, read_only
from tests.hosts import Host, await_events

TRACE, COMPILE = (
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "backend_compile")
)


def test_a_compilation_is_reported_once_and_a_compiled_step_is_not() -> None:
    reported: list[float] = []

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for _ in range(40):
            x = inner(x) + jnp.cos(x)
        return x

    state = jnp.ones((4, 4))
    stop = watch_compilations(reported.append)
    try:
        began_secs = time.monotonic()
        step(state).block_until_ready()
        whole_secs = time.monotonic() - began_secs
        assert 0.2 * whole_secs < sum(reported) <= whole_secs
        reported.clear()
        step(state).block_until_ready()
        assert reported == []
    finally:
        stop()
    stop()
    jax.jit(lambda x: x - 3)(state)
    assert reported == []


def test_events_within_a_later_one_count_once() -> None:
    reported: list[float] = []
    times = CompilationTimes(reported.append)
    times.note_event(TRACE, 0.01)
    times.note_event(TRACE, 0.02)
    times.note_event("/jax/checkpoint/write/duration_sec", 7.0)
    times.note_event(COMPILE, 5.0)
    assert sum(reported) == pytest.approx(5.0)


def test_another_thread_does_not_hold_up_the_training() -> None:
    reported: list[float] = []
    stop = watch_compilations(reported.append)
    try:
        other = threading.Thread(target=lambda: jax.jit(lambda x: x * 17 - 4)(jnp.ones(3)))
        other.start()
        other.join()
    finally:
        stop()
    assert reported == []


def test_a_recompilation_is_a_category_of_the_report(one_host: Host, tmp_path: Path) -> None:
    @jax.jit
    def step(state: jax.Array) -> jax.Array:
        for _ in range(60):
            state = jnp.sin(state) @ state
        return state

    with holdfast.CheckpointManager(tmp_path / "run", framework="jax") as manager:
        for number in range(6):
            # Another shape is another program.
            state = step(jnp.ones((3, 3) if number < 3 else (5, 5)))
            manager.save(number, state)
        manager.finish(5, state)
    await_events(tmp_path / "run", "trainer_left", count=1)
    run = read_only(tmp_path / "run")
    report = report_run("run", events_of(run).read())
    assert report.categories["compiling"] > 0
    assert "compilation" not in report.waiting
