"""AXLearn's own trainer with Holdfast's checkpointer. HOLDFAST_AXLEARN is a folder of its source.

The packages that AXLearn needs are in tests/interop/trainers.txt; `make trainers` installs them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest

import holdfast
from tests.hosts import Host, ending
from tests.interop.trainer_sources import source_or_skip
from tests.ports import free_address

ROOT = Path(__file__).parents[2]
SOURCE = source_or_skip("HOLDFAST_AXLEARN", "axlearn/common", ("tensorflow", "seqio", "flax"))

pytestmark = pytest.mark.soak


@pytest.fixture
def environment(one_host: Host) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(SOURCE), str(ROOT)])
    return one_host.environment | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


def run(environment: dict[str, str], program: str, *arguments: object) -> tuple[int, list[str]]:
    """Return the exit status of a program of this folder, and what it prints after its name."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.interop.{program}", *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ENDED")]
    if done.returncode == 0:
        assert lines, done.stderr[-4000:]
    else:
        print(done.stderr[-4000:])
    return done.returncode, lines[-1] if lines else []


@pytest.mark.parametrize("source", ["tf", "grain"])
@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
def test_a_killed_trainer_ends_with_the_bits_of_axlearns_own_checkpointer(
    source: str, mesh: str, environment: dict[str, str], tmp_path: Path
) -> None:
    train = "axlearn_training"
    own, ours, continued = (tmp_path / name for name in ("own", "ours", "continued"))
    run(environment, train, own, "axlearn", source, "8x1", 6, -1)
    shutil.copytree(own, continued)
    status, expected = run(environment, train, own, "axlearn", source, mesh, 12, -1)
    assert status == 0
    killed, _ = run(environment, train, ours, "holdfast", source, "8x1", 12, 9)
    assert killed == -signal.SIGKILL
    assert run(environment, train, ours, "holdfast", source, mesh, 12, -1) == (0, expected)
    # The training of AXLearn's own checkpointer goes on with this one.
    assert run(environment, train, continued, "holdfast", source, mesh, 12, -1) == (0, expected)
    assert expected[0] == "12"
    assert "VDict" in expected
    with holdfast.open_run(ours / "checkpoints") as saved:
        assert saved.all_steps() == [6, 9, 12]
        assert saved.metadata(12).attempt == 2


def test_the_contract_of_a_checkpointer_is_kept(
    environment: dict[str, str], tmp_path: Path
) -> None:
    status, lines = run(environment, "axlearn_contract", tmp_path)
    assert (status, lines) == (0, ["well"])


def test_a_lost_slices_data_is_read_by_those_that_are_left_until_it_is_back(
    environment: dict[str, str], tmp_path: Path
) -> None:
    read: list[list[int]] = []
    for count, steps in ((3, 2), (2, 3), (3, 2)):
        address = free_address()
        with ExitStack() as held:
            job = [
                held.enter_context(
                    ending(
                        subprocess.Popen(
                            [sys.executable, "-m", "tests.interop.axlearn_elastic"]
                            + [
                                str(each)
                                for each in (tmp_path / "run", address, rank, count, steps)
                            ],
                            env=environment | {"XLA_FLAGS": ""},  # One device each.
                            cwd=ROOT,
                            stdout=subprocess.PIPE,
                            text=True,
                        )
                    )
                )
                for rank in range(count)
            ]
            outputs = [process.communicate(timeout=600)[0] for process in job]
        of_ranks = [json.loads(output.partition("ENDED")[2]) for output in outputs]
        read += [sorted(chain.from_iterable(of_step)) for of_step in zip(*of_ranks, strict=True)]
    assert read == [[*range(12 * step, 12 * step + 12)] for step in range(7)]
    with holdfast.open_run(tmp_path / "run") as saved:
        assert saved.latest_step() == 7
        assert saved.metadata(7).attempt == 3
