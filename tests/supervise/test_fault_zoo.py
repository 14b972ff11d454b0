"""Faults of many kinds in real trainings, and the class that `holdfast run` gives to each end.

Each training has faults in a random order, one for each start; the last one ends it. Most are the
real ones: the kernel kills for memory, a file system is full, a mapping has lost its file. What
needs a device or another host is raised as its library does; `test_hosts_that_hang` loses hosts.
`ZOO_TRAININGS` runs fewer trainings, and `ZOO_JOBS` more or fewer of them at the same time.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.hosts import Host, events
from tests.store.places import mounted
from tests.supervise.test_faults import faulty
from tests.supervise.zoo import Ran, run_all, run_training
from tests.trust.cgroups import memory_cgroup
from tests.trust.figures import tell, tell_table

SEED = 20261126
TRAININGS, FAULTS = 25, 20
HANG_SECS = 8
MEMORY_BYTES = 320 << 20
DISK_BYTES = 8 << 20

CLASSES = {
    "exception": "error",
    "exception of a library": "error",
    "exception from another": "error",
    "deep recursion": "error",
    "before opening": "error",
    "exit code": "error",
    "sys.exit": "error",
    "FloatingPointError": "nan",
    "own NaN check": "nan",
    "MemoryError": "memory",
    "device memory": "memory",
    "host memory": "memory",
    "full disk": "disk",
    "failed save": "disk",
    "storage": "disk",
    "peer closed": "error",
    "SIGKILL": "killed",
    "SIGSEGV": "killed",
    "SIGABRT": "killed",
    "SIGBUS": "killed",
    "notice": "preempted",
    "lock": "hang",
    "interpreter lock": "hang",
    "loader's worker": "hang",
    "evaluation": "hang",
}
"""The kinds after which the training is started again, and their classes."""
ENDINGS = {"SIGTERM to all": "preempted", "Ctrl-C": "stopped"}
COLUMNS = (
    *("error", "nan", "memory", "disk", "lost", "killed", "preempted", "hang", "stopped"),
    "finished",
)


def kinds_of(rng: random.Random) -> list[str]:
    """The faults of one training: all but its last one are followed by a start."""
    kinds = rng.sample([*CLASSES], FAULTS - 1)
    return [*kinds, rng.choice([*ENDINGS])]


def train(folder: Path, kinds: list[str], is_standby: bool, own: Host) -> tuple[list[str], Ran]:
    """One training; the class of each of its ends."""
    # More than two steps before each hang: compilation has another limit.
    faults = [
        [start, -1 if kind == "before opening" else 4 + 5 * start, kind]
        for start, kind in enumerate(kinds)
    ]
    folder.mkdir()
    options = ["--max-restarts", "inf,preempted=inf", "--hang-timeout", HANG_SECS]
    with memory_cgroup() as group, mounted("tmpfs", folder / "disk", f"size={DISK_BYTES}") as disk:
        group.set_limit(MEMORY_BYTES)
        run = disk / "run"
        command = faulty(run, steps=5 * FAULTS + 10, faults=faults)
        standby = ["--standby", "--no-compile-cache"] if is_standby else []
        ran = run_training(own, run, [*options, *standby], command, group)
        # The last end is followed by no decision.
        last = events(run, "command_ended")[-1]["cause"]
        return [*ran.ends, last], ran


@pytest.mark.soak
def test_each_fault_of_the_zoo_is_given_its_class(tmp_path: Path) -> None:
    with memory_cgroup(), mounted("tmpfs", tmp_path / "possible"):
        pass
    rng = random.Random(SEED)
    count = int(os.environ.get("ZOO_TRAININGS", TRAININGS))
    zoo = [kinds_of(rng) for _ in range(count)]
    trainings = [
        functools.partial(train, tmp_path / f"training-{number}", kinds, number % 2 == 1)
        for number, kinds in enumerate(zoo)
    ]
    pairs: Counter[tuple[str, str]] = Counter()
    for number, (kinds, (causes, ran)) in enumerate(zip(zoo, run_all(trainings), strict=True)):
        assert len(causes) == len(kinds), f"seed {SEED}, training {number}: {kinds}\n{ran.told}"
        pairs.update(zip(kinds, causes, strict=True))
    expected = CLASSES | ENDINGS
    wrong = {pair: pairs[pair] for pair in pairs if expected[pair[0]] != pair[1]}
    right = pairs.total() - sum(wrong.values())
    tell(
        "fault zoo",
        f"{TRAININGS * FAULTS} faults of at least 20 kinds, each end given its class",
        f"{right} of {pairs.total()}, of {len({kind for kind, _ in pairs})} kinds",
    )
    tell_table("fault zoo", ("fault", "class", *COLUMNS), matrix(pairs))
    assert not wrong, f"seed {SEED}"


def matrix(pairs: Counter[tuple[str, str]]) -> list[list[str]]:
    """The rows of the confusion matrix: each kind, its class, and how often it had each class."""
    return [
        [kind, name, *(str(pairs[kind, column] or "") for column in COLUMNS)]
        for kind, name in (CLASSES | ENDINGS).items()
        if any(pairs[kind, column] for column in COLUMNS)
    ]
