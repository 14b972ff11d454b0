"""Hostile input: only Holdfast's own errors, in bounded memory and time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.hosts import ending
from tests.trust.figures import tell
from tests.trust.hostile_child import SHARES

ROOT = Path(__file__).parents[2]
SEED = 20260801
WANTED = 1_000_000
PROCESSES = 2


def start_child(seed: int, count: int) -> subprocess.Popen[str]:
    """The process that is given the inputs; it bounds its own memory."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.trust.hostile_child", str(seed), str(count)],
        cwd=ROOT,
        env=os.environ | {"MALLOC_ARENA_MAX": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("count", "secs"),
    [(20_000, 240), pytest.param(WANTED, 3500, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_hostile_input_is_refused_with_holdfasts_own_errors_or_taken(count: int, secs: int) -> None:
    processes = PROCESSES if count == WANTED else 1
    seen: dict[str, Counter[str]] = {name: Counter() for name in SHARES}
    with contextlib.ExitStack() as ends:
        children = [
            ends.enter_context(ending(start_child(SEED + n, count // processes)))
            for n in range(processes)
        ]
        for child in children:
            out, err = child.communicate(timeout=secs)
            assert child.returncode == 0, f"python -m tests.trust.hostile_child …; {err[-5000:]}"
            for name, found in json.loads(out).items():
                seen[name] += Counter(found)
    total = sum(found.total() for found in seen.values())
    assert total >= count
    for name, found in seen.items():
        # A target that refuses everything, or nothing, is not given what it should be; only bytes
        # that do not have their digest are all refused.
        assert (found["taken"] > 0) == (name != "spoilt_bytes"), name
        assert found["taken"] < found.total() or name in ("policies", "commands"), name
    if count == WANTED:
        each = ", ".join(f"{name.replace('_', ' ')} {f.total():,}" for name, f in seen.items())
        refused = total - sum(found["taken"] for found in seen.values())
        tell(
            "hostile input",
            f"{WANTED:,} inputs, only Holdfast's own errors, bounded memory and time",
            f"{total:,} inputs, {refused:,} refused with Holdfast's own errors and no other error, "
            f"within 512 MiB and 10 s of processor time each ({each})",
        )
