"""Rows of what grows with a run's shape: new slots, very many leaves, many ranks on a host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.bench import Bench, median_of
from benchmarks.figures import Figure
from benchmarks.tasks_first_minute import NEW_SLOTS

LARGE_GB = 4.5
FIRST_SECS = 60.0
LEAVES = 100_000
RANKS = 8
RANKS_GB = 2.0
"""Of all ranks together: their state and two slots of it stand in memory at once."""
RANK_SAVES = 3


def first_minute(bench: Bench) -> Iterator[Figure]:
    """What the first two checkpoints cost beyond later ones, and the longest step meanwhile."""
    size_gb = LARGE_GB * bench.scale
    saved, trained = [], []
    for _ in range(bench.rounds):
        with bench.directory() as directory:
            saved.append(bench.worker("first_checkpoints", directory=directory, size_gb=size_gb))
        with bench.directory() as directory:
            trained.append(
                bench.worker(
                    "first_minute",
                    directory=directory,
                    size_gb=size_gb,
                    secs=max(5.0, FIRST_SECS * bench.scale),
                )
            )
    state = f"large {size_gb:.2g} GB"
    yield Figure(
        row="the first two checkpoints: core seconds beyond a later one's, of each",
        state=state,
        reached=median_of(saved, _excess_core_secs),
        wanted=2,
        at_most=True,
        unit="s",
        measured={"rounds": saved},
    )
    yield Figure(
        row="the same, of what a plain program uses for as much new memory",
        state=state,
        reached=median_of(saved, lambda m: _excess_core_secs(m) / m["new_pages_core_secs"]),
        wanted=1.5,
        at_most=True,
    )
    yield Figure(
        row="the longest step of the first minute, of a step without checkpoints",
        state=state,
        reached=median_of(trained, lambda m: max(m["step_secs"]) / m["step_without_secs"]),
        wanted=2,
        at_most=True,
        measured={"rounds": trained},
    )


def _excess_core_secs(measured: dict[str, Any]) -> float:
    secs = measured["core_secs"]
    return statistics.mean(secs[:NEW_SLOTS]) - statistics.mean(secs[NEW_SLOTS:])


def leaves(bench: Bench) -> Iterator[Figure]:
    """A restore of 100,000 leaves, in calls of `save` of other objects of the same form."""
    count = max(100, round(LEAVES * bench.scale))
    for framework, name in (("jax", "JAX"), ("numpy", "NumPy")):
        found = []
        for _ in range(bench.rounds):
            with bench.directory() as directory:
                found.append(
                    bench.worker("leaves", directory=directory, framework=framework, count=count)
                )
        yield Figure(
            row=f"{name}: a restore `like`, of a later `save` until it is durable",
            state=f"{count:,} leaves",
            reached=median_of(found, _restore_of_save),
            wanted=2,
            at_most=True,
            measured={"rounds": found},
        )


def _restore_of_save(measured: dict[str, Any]) -> float:
    return statistics.median(measured["restore_secs"]) / statistics.median(
        measured["sealed_secs"][1:]
    )


def ranks(bench: Bench) -> Iterator[Figure]:
    """Eight ranks on a host, of one rank with a state as large as theirs together."""
    size_gb = RANKS_GB * bench.scale
    found: dict[int, list[dict[str, Any]]] = {1: [], RANKS: []}
    for number in range(bench.rounds):
        for count in (1, RANKS) if number % 2 == 0 else (RANKS, 1):
            with bench.directory() as directory:
                found[count].append(
                    bench.worker(
                        "ranks_together",
                        directory=directory,
                        ranks=count,
                        size_gb=size_gb,
                        count=RANK_SAVES,
                    )
                )

    for key, told in (("safe_secs", "sealed in RAM"), ("durable_secs", "durable")):
        one, many = (_median_secs(found[count], key) for count in (1, RANKS))
        yield Figure(
            row=f"{RANKS} ranks on a host: {told}, of one rank with as much",
            state=f"{size_gb:.2g} GB in all",
            reached=many / one,
            wanted=1.15,
            at_most=True,
            measured={str(count): rounds for count, rounds in found.items()},
        )


def _median_secs(rounds: list[dict[str, Any]], key: str) -> float:
    return median_of(rounds, lambda measured: statistics.median(measured[key]))


SHAPE_ROWS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "first-minute": first_minute,
    "leaves": leaves,
    "ranks": ranks,
}
