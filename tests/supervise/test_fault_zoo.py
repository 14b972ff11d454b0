"""Faults of many kinds in real trainings, and the class that `holdfast run` gives to each end.

Each training has faults in a random order, one for each start; the last one ends it. A hang must
be found in time. `ZOO_TRAININGS` runs fewer trainings.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.command_line import INTERRUPTIBLE
from tests.hosts import Host, events
from tests.supervise.test_faults import faulty
from tests.trust.figures import tell

SEED = 20261126
TRAININGS, FAULTS, HANGS = 25, 20, 4
HANG_SECS = 4
SECS_MAX = 900.0

CLASSES = {
    "exception": "error",
    "exception of a library": "error",
    "exception from another": "error",
    "exit code": "error",
    "sys.exit": "error",
    "FloatingPointError": "nan",
    "own NaN check": "nan",
    "MemoryError": "memory",
    "device memory": "memory",
    "full disk": "disk",
    "failed save": "disk",
    "storage": "disk",
    "peer closed": "lost",
    "SIGKILL": "killed",
    "SIGSEGV": "killed",
    "SIGABRT": "killed",
    "notice": "preempted",
    "lock": "hang",
    "interpreter lock": "hang",
    "loader's worker": "hang",
    "data": "hang",
}
"""The kinds after which the training is started again, and their classes."""
ENDINGS = {"SIGTERM to all": "preempted", "Ctrl-C": "stopped"}
HANGING = [kind for kind, name in CLASSES.items() if name == "hang"]


def kinds_of(rng: random.Random) -> list[str]:
    """The faults of one training: four that hang, fifteen others, and one that ends it."""
    others = [kind for kind in CLASSES if kind not in HANGING]
    restarted = rng.choices(HANGING, k=HANGS) + rng.choices(others, k=FAULTS - HANGS - 1)
    rng.shuffle(restarted)
    return [*restarted, rng.choice([*ENDINGS])]


@pytest.mark.soak
def test_each_fault_of_the_zoo_is_given_its_class(one_host: Host, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    pairs: Counter[tuple[str, str]] = Counter()
    delays_secs: list[int] = []
    for number in range(int(os.environ.get("ZOO_TRAININGS", TRAININGS))):
        kinds, run = kinds_of(rng), tmp_path / f"run-{number}"
        # More than two steps before each hang: compilation has another limit.
        faults = [[start, 4 + 5 * start, kind] for start, kind in enumerate(kinds)]
        budgets = ["--max-restarts", "inf,preempted=inf", "--hang-timeout", HANG_SECS]
        command = faulty(run, steps=5 * FAULTS + 10, faults=faults)
        process = one_host.start("-c", INTERRUPTIBLE, "run", *budgets, "--", *command)
        _, err = process.communicate(timeout=SECS_MAX)
        causes = [event["cause"] for event in events(run, "command_ended")]
        expected = [(CLASSES | ENDINGS)[kind] for kind in kinds]
        assert len(causes) == len(expected), f"seed {SEED}, training {number}: {causes}\n{err}"
        pairs.update(zip(expected, causes, strict=True))
        delays_secs += [
            int(secs) - HANG_SECS for secs in re.findall(r"run: hang: no step for (\d+)", err)
        ]
    right = sum(count for (wanted, named), count in pairs.items() if wanted == named)
    matrix = ", ".join(
        f"{wanted} {count}" if wanted == named else f"{wanted} named {named} {count}"
        for (wanted, named), count in sorted(pairs.items())
    )
    hangs = sum(count for (wanted, _), count in pairs.items() if wanted == "hang")
    tell(
        "fault zoo",
        "500 faults of 23 kinds, each end given its class; 100 hangs found within 2 s of the limit",
        f"{right} of {pairs.total()} ({matrix}); {len(delays_secs)} of {hangs} hangs, the latest "
        f"{max(delays_secs, default=0)} s after the limit",
    )
    assert right == pairs.total(), f"seed {SEED}: {matrix}"
    assert len(delays_secs) == hangs
    assert max(delays_secs, default=0) <= 2
