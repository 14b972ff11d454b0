"""Models that FSDP2 and tensor parallelism divide over real processes, restored into any division.

The ranks compare what they restored with what the saving ranks gathered; see `torch_meshes`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Host

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch cannot be had here"
)

Jobs = list[tuple[int, list[str]]]

OF_FOUR = ["fsdp", "tp", "fsdp_tp", "hsdp", "plain"]


def run_jobs(host: Host, directory: Path, jobs: Jobs) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapt.torch_meshes", str(directory), json.dumps(jobs)],
        env=host.environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(jobs)


@pytest.mark.soak
def test_what_two_meshes_cut_into_uneven_parts_is_restored_by_fewer_processes(
    one_host: Host, tmp_path: Path
) -> None:
    run_jobs(one_host, tmp_path, [(4, ["fsdp_tp"]), (3, ["tp"])])


@pytest.mark.soak
def test_every_placement_is_restored_into_every_placement(one_host: Host, tmp_path: Path) -> None:
    jobs: Jobs = [(4, [*OF_FOUR, "fsdp1", "meta"]), (3, ["fsdp", "tp"]), (2, ["fsdp", "columns"])]
    run_jobs(one_host, tmp_path, [*jobs, (1, ["plain"]), (8, ["hsdp_tp"]), (4, OF_FOUR)])
