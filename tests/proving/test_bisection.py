"""Replays of a run that was right, of one that went wrong, and of a program without one result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attempts import folder_of
from tests.hosts import Host, host

PROGRAM = """
import os, sys
import numpy as np
import holdfast
from holdfast import preservation_policy, save_decision_policy

policies = {
    "save_decision_policy": save_decision_policy.FixedIntervalPolicy(5),
    "preservation_policy": preservation_policy.LatestN(None),
}
with holdfast.CheckpointManager("run", framework="numpy", **policies) as manager:
    start, state = manager.resume({"w": np.zeros(50), "n": 0})
    for step in range(start, 22):
        state["w"] = 0.9 * state["w"] + np.sin(np.arange(50) + step)
        state["n"] = step
        if step == 12 and os.environ.get("FAULT") == "flip":
            state["w"].view(np.uint8)[123] ^= 16
        if step == 13 and "--random" in sys.argv:
            state["w"][7] += np.frombuffer(os.urandom(1), np.uint8)[0] + 1
        manager.save(step, state, metrics={"n": step})
        manager.wait_until_finished()
    manager.finish(21, state)
"""


# In its replays, one loss is rejected.
GUARDED = """
import os
import numpy as np
import holdfast
from holdfast import preservation_policy, save_decision_policy

is_bad = os.path.exists("run")
guard = holdfast.LossGuard(patience=4)
policies = {
    "save_decision_policy": save_decision_policy.FixedIntervalPolicy(5),
    "preservation_policy": preservation_policy.LatestN(None),
}
with holdfast.CheckpointManager("run", framework="numpy", guard=guard, **policies) as manager:
    step, state = manager.resume({"n": 0, "guard": guard})
    while step < 16:
        if guard.rejects(step, np.nan if is_bad and step == 12 else 1.0):
            is_bad = False
            step, state = manager.rewind(state)
            continue
        state["n"] += step
        manager.save(step, state)
        manager.wait_until_finished()
        step += 1
"""


@pytest.fixture
def one_host() -> Iterator[Host]:
    with host() as made:
        yield made


def bisected(
    host: Host,
    folder: Path,
    *arguments: str,
    text: str = PROGRAM,
    fault: str = "",
    missing_step: int | None = None,
) -> tuple[int, dict]:
    """Train in `folder`, then bisect; return the exit code and the result.

    `missing_step` is that of a checkpoint whose folder is removed in between.
    """
    (folder / "train.py").write_text(text)
    program = [sys.executable, "train.py", *arguments]
    trained = subprocess.run(
        program,
        cwd=folder,
        env={**host.environment, "FAULT": fault},
        capture_output=True,
        text=True,
    )
    assert trained.returncode == 0, trained.stderr
    if missing_step is not None:
        shutil.rmtree(folder_of(folder / "run", missing_step))
    command = [sys.executable, "-m", "holdfast", "bisect", "run", "--json", "--", *program]
    done = subprocess.run(command, cwd=folder, env=host.environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_run_that_went_wrong_is_told_from_its_replays(one_host: Host, tmp_path: Path) -> None:
    code, found = bisected(one_host, tmp_path, fault="flip", missing_step=5)
    assert (code, found["outcome"]) == (1, "not_reproduced")
    assert (found["reproduced"], found["step"]) == (10, 15)
    assert [difference["name"] for difference in found["differences"]] == ["w"]
    (uncompared,) = found["not_compared"]
    assert uncompared.startswith("step 5: files are missing"), uncompared


@pytest.mark.soak
def test_a_run_that_is_right_is_reproduced(one_host: Host, tmp_path: Path) -> None:
    code, found = bisected(one_host, tmp_path)
    assert (code, found["outcome"], found["reproduced"]) == (0, "reproduced", 21)
    # The run ended with `finish`, and the replay saves each step by `save`.
    assert found["not_compared"] == ["metric n: one of the two runs saved step 21 without it"]


@pytest.mark.soak
def test_a_program_that_is_not_deterministic_is_found_at_its_step(
    one_host: Host, tmp_path: Path
) -> None:
    code, found = bisected(one_host, tmp_path, "--random")
    assert (code, found["outcome"]) == (1, "not_deterministic")
    assert (found["reproduced"], found["step"]) == (12, 13)


@pytest.mark.soak
def test_a_replay_that_goes_back_is_not_judged(one_host: Host, tmp_path: Path) -> None:
    code, found = bisected(one_host, tmp_path, text=GUARDED)
    assert (code, found["error"]) == (2, "NotComparableError")
    assert "found that the first replay went back to step 7 with manager.rewind" in found["message"]


def test_a_run_with_one_checkpoint_cannot_be_judged(one_host: Host, tmp_path: Path) -> None:
    (tmp_path / "save.py").write_text(
        "import numpy as np, holdfast\n"
        "with holdfast.CheckpointManager('run', framework='numpy') as manager:\n"
        "    manager.finish(0, {'w': np.ones(3)})\n"
    )
    program = [sys.executable, "save.py"]
    subprocess.run(program, cwd=tmp_path, env=one_host.environment, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "bisect", "run", "--", *program],
        cwd=tmp_path,
        env=one_host.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "expected two checkpoints at least" in done.stderr
