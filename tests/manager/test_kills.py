"""SIGKILL at random moments: every time back, bit for bit, and no sealed step lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.hosts import Host, events, finished

TRAINER = Path(__file__).with_name("trainer.py")
OPTIONS = json.dumps({"sleep": 0.004})
SEED = 20261120


def uninterrupted(host: Host, run: Path, steps: int) -> str:
    out = finished(host.start(TRAINER, run, steps, json.dumps({})))
    return json.loads(out.splitlines()[-1])["fingerprint"]


def last_sealed(run: Path) -> int:
    return max((e["step"] for e in events(run, "sealed")), default=-1)


@pytest.mark.parametrize(("victims", "kills"), [("trainer", 20), ("agent", 4), ("both", 4)])
def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(
    one_host: Host, tmp_path: Path, victims: str, kills: int
) -> None:
    chance = random.Random(f"{SEED} {victims}")
    run, sealed = tmp_path / "run", -1
    for kill in range(kills):
        trainer = one_host.start(TRAINER, run, 10**9, OPTIONS)
        first = json.loads(trainer.stdout.readline())
        assert first["start"] > sealed, f"seed {SEED}, kill {kill}: step {sealed} was sealed"
        assert set(first["sources"]) <= {"ram"}
        json.loads(trainer.stdout.readline())
        time.sleep(chance.uniform(0, 0.3))
        if victims != "trainer":
            os.kill(one_host.agent().pid, signal.SIGKILL)
            if victims == "agent":
                time.sleep(chance.uniform(0, 0.6))
        trainer.kill()
        trainer.wait()
        sealed = last_sealed(run)
    assert sealed > 0
    steps = sealed + 10
    out = finished(one_host.start(TRAINER, run, steps, OPTIONS))
    resumed = json.loads(out.splitlines()[-1])["fingerprint"]
    assert resumed == uninterrupted(one_host, tmp_path / "other", steps)
