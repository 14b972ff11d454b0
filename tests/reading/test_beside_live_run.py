"""A reader beside a run that saves and deletes all the time sees whole checkpoints, no errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import errors
from tests.hosts import Host, ending

TRAINER = Path(__file__).with_name("live_trainer.py")
READINGS = 20


@pytest.mark.slow
def test_a_reader_follows_a_run_that_saves_and_deletes(one_host: Host, tmp_path: Path) -> None:
    command = [sys.executable, str(TRAINER), str(tmp_path / "run")]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with ending(subprocess.Popen(command, env=one_host.environment, text=True, **pipes)) as trainer:
        follow(trainer, tmp_path / "run")


def follow(trainer: subprocess.Popen[str], path: Path) -> None:
    """Read a run again and again while this trainer saves and deletes in it."""
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    seen: list[int] = []
    with holdfast.open_run(path) as run:
        while len(seen) < READINGS:
            step = run.wait_for_step(after=seen[-1] if seen else None, timeout_secs=240)
            # A step that was there a moment ago may be deleted: that is one clear error.
            try:
                given = run.restore(step, only=["small", "n"])
                assert given["n"] == step
                assert (given["small"] == step).all()
                assert run.metadata(step).values["n"] == step
            except errors.StepNotFoundError:
                pass
            state = run.restore()
            assert state["n"] >= step
            assert (state["w"] == state["n"]).all()
            steps = run.all_steps()
            assert steps
            assert steps == sorted(steps)
            assert steps[-1] >= step
            seen.append(step)
        owned = run.restore()
        value = owned["n"]
        # It was the caller's own memory: the run uses its slots many times after.
        run.wait_for_step(after=value + READINGS, timeout_secs=240)
    out, _ = trainer.communicate("stop\n", timeout=240)
    assert trainer.returncode == 0, out
    assert (owned["w"] == value).all()
    assert seen == sorted(set(seen))
    assert int(out.split()[-1]) > seen[-1]


def test_a_reader_changes_no_file_and_starts_no_agent(one_host: Host, tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", {"w": np.ones(3), "n": 1})

    def files() -> list[tuple[str, int, int]]:
        found = sorted((tmp_path / "a").rglob("*"))
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in found]

    before = files()
    with holdfast.open_run(tmp_path / "a") as run:
        run.restore()
        run.restore(0, like={"w": np.zeros(3), "n": 0})
        run.metadata(0)
        run.process_values(0)
        run.all_steps()
    assert files() == before
    assert not one_host.agent_processes()
    assert not list(one_host.folder.iterdir())
