"""Hangs of real trainings at seeded moments, found in time; and slow steps, which are none.

A training hangs again and again, each time in another start. A rank that was stopped is named and
not ended: the test continues it. Most of the time of such a training is waiting, so that several
run side by side.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.hosts import Host
from tests.supervise.test_faults import faulty
from tests.supervise.zoo import Ran, delays_secs, run_all, run_training
from tests.trust.figures import tell

SEED = 20261126
LIMIT_SECS = 4
LATE_SECS = 2
COLLECTIVE = Path(__file__).with_name("collective_trainer.py")
KINDS = ("lock", "interpreter lock", "loader's worker", "data", "evaluation", "stopped")
TRAININGS, HANGS = 10, 8
"""Of one process: 80 hangs. Of two ranks that meet in a collective, four trainings with 5 each."""
COLLECTIVES, COLLECTIVE_HANGS = 4, 5
SLOW_TRAININGS, SLOW_STEPS = 20, 10
SLOW_KINDS = ("sleep", "data", "evaluation", "compute")
WAITS = ("wait", "stop")
NAMES = {"wait": "collective", "stop": "collective with a stopped rank"}


def train(run: Path, kinds: list[str], rng: random.Random, own: Host) -> Ran:
    """A training of one process that hangs in each of its starts but the last one."""
    faults, start = [], 0
    for number, kind in enumerate(kinds):
        # More than two steps after each start: compilation has another limit.
        faults.append([start, 6 + 6 * number, kind, rng.uniform(0.0, 0.5)])
        start += kind != "stopped"
    options = ["--max-restarts", "hang=inf", "--hang-timeout", LIMIT_SECS]
    command = faulty(run, steps=6 * len(kinds) + 12, faults=faults)
    return run_training(own, run, options, command)


def train_ranks(run: Path, kinds: list[str], rng: random.Random, own: Host) -> Ran:
    """A training of two ranks, of which one waits before the collective, or is stopped."""
    faults, start = [], 0
    for number, kind in enumerate(kinds):
        faults.append([start, rng.randrange(2), 6 + 6 * number, kind])
        start += kind != "stop"
    own.variables["COLLECTIVE_STEPS"] = str(6 * len(kinds) + 12)
    options = ["--max-restarts", "hang=inf", "--hang-timeout", LIMIT_SECS]
    command = [sys.executable, str(COLLECTIVE), str(run), json.dumps(faults)]
    ran = run_training(own, run, options, command)
    waiting = [fault[1] for fault in faults if fault[3] == "wait"]
    behind = [int(re.search(r"behind: rank (\d)", line.text)[1]) for line in ran.hangs]
    assert behind == waiting, ran.told
    return ran


def train_slowly(run: Path, kind: str, slow: dict[str, float], own: Host) -> Ran:
    """A training with slow steps, each within the limit."""
    options = ["--max-restarts", "hang=inf", "--hang-timeout", LIMIT_SECS]
    command = faulty(run, steps=6 + len(slow), slow=slow, slow_kind=kind)
    return run_training(own, run, options, command)


@pytest.mark.soak
def test_seeded_hangs_of_real_trainings_are_found_in_time(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    trainings, hangs = [], []
    for number in range(TRAININGS):
        hangs.append(rng.choices(KINDS, k=HANGS))
        run, own = tmp_path / f"run-{number}", random.Random(rng.random())
        trainings.append(functools.partial(train, run, hangs[-1], own))
    for number in range(COLLECTIVES):
        hangs.append(rng.choices(WAITS, k=COLLECTIVE_HANGS))
        run, own = tmp_path / f"ranks-{number}", random.Random(rng.random())
        trainings.append(functools.partial(train_ranks, run, hangs[-1], own))
    late: list[float] = []
    kinds: Counter[str] = Counter()
    for number, (expected, ran) in enumerate(zip(hangs, run_all(trainings), strict=True)):
        where = f"seed {SEED}, training {number}: {expected}\n{ran.told}"
        assert ran.code == 0, where
        assert [kind for kind, _ in ran.faults] == expected, where
        stopped = [kind for kind in expected if kind in ("stop", "stopped")]
        assert (len(ran.hangs), len(ran.held)) == (len(expected) - len(stopped), len(stopped))
        ending = sorted({*expected} - {*stopped})
        late += delays_secs(ran, ran.hangs, ending)
        late += delays_secs(ran, ran.held, stopped)
        kinds.update(NAMES.get(kind, kind) for kind in expected)
    within = sum(secs <= LIMIT_SECS + LATE_SECS for secs in late)
    tell(
        "hangs",
        f"100 seeded hangs, each named within {LATE_SECS} s after the limit",
        f"{within} of {len(late)}, the latest {max(late) - LIMIT_SECS:.1f} s after the limit "
        f"({', '.join(f'{kind} {count}' for kind, count in kinds.most_common())})",
    )
    assert within == len(late) == TRAININGS * HANGS + COLLECTIVES * COLLECTIVE_HANGS


@pytest.mark.soak
def test_slow_steps_of_real_trainings_are_no_hang(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    trainings = []
    for number in range(SLOW_TRAININGS):
        # A little below the limit, for what else a step does.
        slow = {str(6 + step): rng.uniform(0.1, 0.8) * LIMIT_SECS for step in range(SLOW_STEPS)}
        kind = SLOW_KINDS[number % len(SLOW_KINDS)]
        trainings.append(functools.partial(train_slowly, tmp_path / f"run-{number}", kind, slow))
    results = run_all(trainings)
    ended = [ran.told for ran in results if ran.code or ran.hangs]
    tell(
        "slow steps",
        "200 slow steps below the limit, no restart",
        f"{SLOW_TRAININGS * SLOW_STEPS} steps of up to {0.8 * LIMIT_SECS:.1f} s with a limit of "
        f"{LIMIT_SECS} s, {len(ended)} restarts",
    )
    assert not ended
