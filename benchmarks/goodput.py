"""Goodput: the same training, killed by the same seeded schedule, with each system."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figures import Figure

STEPS = 700
MEAN_SECS_BETWEEN_FAILURES = 15.0
LEAST_SECS_BETWEEN_FAILURES = 1.0
FAILURES_MAX = 60
RUN_SECS = 900.0


def goodput(bench: Bench) -> Iterator[Figure]:
    """Wall time under failures over the failure-free time, start-up included."""
    steps = max(20, int(STEPS * bench.scale))
    free: list[float] = []
    found: dict[str, list[dict[str, Any]]] = {"holdfast": [], "orbax": []}
    for seed in range(bench.rounds):
        free.append(_run(bench, "none", steps, None)["secs"])
        for system in found:
            found[system].append(_run(bench, system, steps, seed))
    without = statistics.median(free)
    excess = {
        system: statistics.median(run["secs"] for run in runs) - without
        for system, runs in found.items()
    }
    assert len({run["params"] for runs in found.values() for run in runs}) == 1
    yield Figure(
        row="goodput under failures: excess over the failure-free time, of Orbax's",
        state="the demo's training",
        reached=excess["holdfast"] / excess["orbax"],
        wanted=0.5,
        at_most=True,
        measured={"free_secs": free, "runs": found},
    )


def _run(bench: Bench, system: str, steps: int, seed: int | None) -> dict[str, Any]:
    """One training to its end; with a seed it is killed on that seed's schedule."""
    chance = random.Random(seed)
    with bench.directory() as directory:
        command = [sys.executable, "-m", "benchmarks.goodput_trainer"]
        command += [system, directory, str(steps)]
        # As where restarts are expected: what was compiled once is read from here afterwards.
        environment = bench.environment | {"JAX_COMPILATION_CACHE_DIR": f"{directory}.compiled"}
        started = time.monotonic()
        kills = 0
        while True:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            alive_secs = None
            if seed is not None and kills < FAILURES_MAX:
                alive_secs = chance.expovariate(1 / MEAN_SECS_BETWEEN_FAILURES)
                alive_secs = max(LEAST_SECS_BETWEEN_FAILURES, alive_secs)
            try:
                out, _ = process.communicate(timeout=alive_secs or RUN_SECS)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
        secs = time.monotonic() - started
        if process.returncode:
            raise RuntimeError(f"the training with {system} ended with {process.returncode}")
    return {"secs": secs, "kills": kills, "params": json.loads(out)["params"]}
