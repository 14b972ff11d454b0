"""Ranks that run ahead and lag behind: no checkpoint is of two steps, and none is half there."""

from __future__ import annotations

import bisect
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.format.stranger import read_checkpoint
from tests.hosts import Host
from tests.manifests import manifests
from tests.trainer.job import Job, run_job, seen, start_job

SEED = 20261122
SOAK_SEEDS = range(1, 7)
BLOCK_STEPS = 40
AHEAD_STEPS = 20
OPTIONS: dict[str, Any] = {"device_count": 1, "sleep": 0.01, "tell": True}


def pauses(seed: int, count: int, steps: int) -> list[dict[int, int]]:
    """Of each rank, before which steps it stands still for how many steps' time.

    One after the other does so in each round, in a random order and for as long as the others.
    """
    chance = random.Random(seed)
    made: list[dict[int, int]] = [{} for _ in range(count)]
    for first in range(BLOCK_STEPS, steps, BLOCK_STEPS * count):
        length = chance.randint(2 * AHEAD_STEPS, 3 * AHEAD_STEPS)
        for turn, rank in enumerate(chance.sample(range(count), count)):
            made[rank][first + BLOCK_STEPS * turn] = length
    return made


def most_ahead(job: Job) -> int:
    """By how many steps one rank was ahead of another one at the same moment, at most."""
    times = [[line["at_secs"] for line in rank.said("step")] for rank in job.ranks]
    return max(
        step - bisect.bisect(others, at_secs)
        for own in times
        for step, at_secs in enumerate(own)
        for others in times
    )


def check_drifting(hosts: list[Host], run: Path, seed: int, steps: int, **todo: Any) -> None:
    job = start_job(
        hosts, run, **OPTIONS, **todo, steps=steps, pauses=pauses(seed, len(hosts), steps)
    )
    found = job.results()
    where = f"seed {seed}"
    assert most_ahead(job) > AHEAD_STEPS, where
    committed = seen(run, "committed")
    assert len(committed) >= 3, where
    assert committed == set(found[0]["steps"]), where
    assert committed <= set.intersection(*(set(r["saved"]) for r in found)), where
    begun = {p.parent.name for p in run.glob("checkpoints/*/part-*")}
    assert not begun - manifests(run).keys(), f"{where}: something half made is left"
    rows = np.arange(48 * 50, dtype=np.float32).reshape(48, 50)
    for step in committed:
        read = read_checkpoint(run, step, 1)
        assert np.array_equal(read.arrays["sharded"], rows + step), where
        assert np.array_equal(read.arrays["replicated"], 2 * (rows + step)), where
        places = [values[("position",)]["value"] for values in read.rank_values]
        assert places == [1000 * rank + step for rank in range(len(hosts))], where
    left = {r.get("left") for r in found}
    assert len(left) == 1, where


@pytest.mark.soak
def test_ranks_that_drift_by_twenty_steps_save_no_mixed_and_no_half_checkpoint(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    check_drifting(three_hosts, tmp_path / "run", SEED, 370, signal_at=350, signal_rank=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_ranks_that_drift_at_random_mix_nothing(
    three_hosts: list[Host], tmp_path: Path, seed: int
) -> None:
    run = tmp_path / "run"
    policy = {"interval": 13} if seed % 2 else {}
    check_drifting(three_hosts, run, seed, 600, **policy)
    run_job(three_hosts, run, **OPTIONS, steps=1)
