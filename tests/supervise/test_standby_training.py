import sys
from pathlib import Path

import pytest

from tests.hosts import Host
from tests.supervise.standby_job import Job

TRAINING = Path(__file__).with_name("standby_training.py")


@pytest.mark.slow
# Two cold starts with PyTorch take half a minute of a processor.
@pytest.mark.parametrize("framework", ["jax", pytest.param("torch", marks=pytest.mark.soak)])
def test_a_killed_training_goes_on_in_a_fork(
    one_host: Host, tmp_path: Path, framework: str
) -> None:
    pytest.importorskip(framework, reason=f"{framework} cannot be had here", exc_type=ImportError)
    run = tmp_path / "run"
    program = [sys.executable, TRAINING, framework, tmp_path]
    job = Job(one_host, tmp_path, "--directory", run, "--", *program)
    attempts = [job.seen()]
    job.await_ready()
    job.end(0)
    attempts.append(job.seen())
    job.end(1, "0")
    assert job.await_end() == 0
    assert [attempt["imported"] for attempt in attempts] == [False, True]
    assert 0 == attempts[0]["start"] < attempts[1]["start"]
    assert framework == "jax" or len({attempt["seed"] for attempt in attempts}) == 2
    assert not any("Warning" in line or "cold start" in line for line in job.errors), job.errors
    compiled = tmp_path / ".holdfast-compiled" / one_host.name
    assert framework == "torch" or list((compiled / "jax").iterdir())
