"""Ranks are lost at seeded moments, many times in a row: times to the next step, and bits."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, host
from tests.supervise.ranks.rank_plan import Fault, Outcome, run_job
from tests.trust.figures import tell

LOSSES = int(os.environ.get("HOLDFAST_LOSSES", "20"))
SEED = int(os.environ.get("HOLDFAST_SCHEDULE", "33"))
WIDTH = 2041
"""The state of three square matrices and their momenta has 100 MB."""
MOMENTS = ("forward", "backward", "optimizer", "save")
RANKS = 4


@pytest.fixture
def one_host() -> Iterator[Host]:
    with host() as made:
        yield made


def faults_of(seed: int) -> tuple[Fault, ...]:
    """Return the losses, at other steps each; one in ten is in a restore, one a stopped rank."""
    generator = random.Random(seed)
    faults = []
    for index in range(LOSSES):
        rank, step = generator.randrange(RANKS), 3 + 4 * index
        if index % 10 == 4:
            faults.append(Fault(0, rank, -1, "restore"))
        faults.append(Fault(0, rank, step, generator.choice(MOMENTS)))
        if index % 10 == 7:
            other = (rank + 1 + generator.randrange(RANKS - 1)) % RANKS
            faults[-1] = Fault(0, rank, step, "forward")
            faults.append(Fault(0, other, step, "forward", "stop"))
    return tuple(faults)


def recoveries(outcome: Outcome) -> Iterator[tuple[float, int]]:
    """Yield for each loss the time to the next new step on all ranks, and the steps repeated."""
    steps = outcome.of("step")
    for fault in outcome.of("fault"):
        if fault["step"] < 0:
            continue
        again = [line for line in steps if line["secs"] > fault["secs"]]
        first = [
            min(
                line["secs"]
                for line in again
                if line["rank"] == rank and line["step"] >= fault["step"]
            )
            for rank in range(RANKS)
        ]
        repeated = {line["step"] for line in again if line["step"] < fault["step"]}
        yield max(first) - fault["secs"], len(repeated)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("keep_last", [False, True])
def test_the_others_go_on_after_losses_at_random(
    keep_last: bool, one_host: Host, tmp_path: Path
) -> None:
    steps = 4 * LOSSES + 4
    plan = {"steps": steps, "width": WIDTH, "interval": 5, "leave_secs": 3.0}
    undisturbed = run_job(one_host, directory=str(tmp_path / "a"), spares=0, **plan)
    assert undisturbed.code == 0, undisturbed.notes
    print(f"seed {SEED}")
    outcome = run_job(
        one_host,
        directory=str(tmp_path / "b"),
        spares=2,
        keep_last=keep_last,
        faults=faults_of(SEED),
        **plan,
    )
    assert outcome.code == 0, outcome.notes
    assert len(undisturbed.digests) == 1
    assert outcome.digests == undisturbed.digests
    secs, repeated = zip(*recoveries(outcome), strict=True)
    sources = {name for line in outcome.of("resumed") for name in line["sources"] or ()}
    assert sources == {"ram"}
    tell(
        f"lost ranks{', last step kept' if keep_last else ''}",
        "median 1 s plus one step, worst 5 s; no bit lost",
        f"{len(secs)} losses: median {statistics.median(secs):.2f} s, worst {max(secs):.2f} s; "
        f"{sum(repeated)} steps repeated; all bits equal",
    )
