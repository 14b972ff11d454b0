"""A launcher that repeats SIGTERM within a second costs no step, whenever the manager closes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import holdfast
from tests.cli.command_line import await_line
from tests.hosts import Host

PROGRAM = """
import sys, time
import numpy as np
import holdfast
from holdfast import save_decision_policy

policy = save_decision_policy.FixedIntervalPolicy(1_000_000)
with holdfast.CheckpointManager(
    sys.argv[1], framework="numpy", save_decision_policy=policy
) as manager:
    state = {"w": np.zeros(1000)}
    print("ready", flush=True)
    for step in range(10**8):
        manager.save(step, state)
        if manager.reached_preemption(step):
            print("stopped at", step, flush=True)
            break
print("closed", flush=True)
time.sleep(60 if sys.argv[2] == "closed" else 0)
"""


@pytest.mark.parametrize(("seen", "code"), [("stopped", 0), ("closed", -signal.SIGTERM)])
def test_a_repeated_signal_costs_no_step(
    one_host: Host, tmp_path: Path, seen: str, code: int
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    trainer = one_host.start(tmp_path / "program.py", tmp_path / "run", seen, stem="numpy")
    await_line(trainer, "ready")
    trainer.send_signal(signal.SIGTERM)
    stopped_at = int(await_line(trainer, "stopped").split()[-1])
    if seen == "closed":
        await_line(trainer, "closed")
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(240) == code
    with holdfast.open_run(tmp_path / "run") as run:
        assert run.latest_step() == stopped_at
