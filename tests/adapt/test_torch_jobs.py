"""A job of PyTorch under torchrun, and its checkpoint read without PyTorch."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from tests.hosts import Host

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch cannot be had here"
)


def test_a_job_under_torchrun_goes_on_with_another_number_of_processes(
    one_host: Host, tmp_path: Path
) -> None:
    for count, expected in ((2, "resumed at 0"), (3, "resumed at 1")):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={count}", "-m", "tests.adapt.torch_job"),
                str(tmp_path / "run"),
            ],
            env=one_host.environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(expected) == count
    found = holdfast.open_run(tmp_path / "run").restore()
    for name in ("rows", "columns", "copies"):
        assert np.array_equal(found[name], np.arange(30, dtype=np.float32).reshape(10, 3))


@pytest.mark.soak
def test_the_agent_outlives_the_worker_group_and_a_restart_reads_its_ram(
    one_host: Host, tmp_path: Path
) -> None:
    ends = []
    for how in ("killed", "ends"):
        ends.append(
            subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node=2", "-m", "tests.adapt.torch_restarted_job"),
                    *(str(tmp_path / "run"), how),
                ],
                env=one_host.environment,
                cwd=Path(__file__).parents[2],
                capture_output=True,
                text=True,
                timeout=100,
            )
        )
    assert [done.returncode != 0 for done in ends] == [True, False], ends[1].stderr
    # torchrun may print the lines of two ranks as one.
    found = [json.loads(text) for text in re.findall(r"\{.*?\}\}", ends[1].stdout)]
    expected = {"start": 6, "w": float(sum(range(9)))}
    assert [(f | {"sources": [*f["sources"]]}) for f in found] == [
        expected | {"sources": ["ram"]}
    ] * 2
