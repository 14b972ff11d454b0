"""A root that nobody may write, as containers have it: the RAM folder and the run's are enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.hosts import Host, host

PROGRAM = """
import sys
import numpy as np
import holdfast
with holdfast.CheckpointManager(sys.argv[1]) as manager:
    for step in range(3):
        manager.save(step, {"w": np.full(1000, step)}, force=True)
    manager.wait_until_finished()
    assert manager.all_steps() == [0, 1, 2]
    assert manager._session.place.ram_folder.is_relative_to(sys.argv[2])
"""
SCRIPT = """
set -eu
mount --make-rprivate /
mount --bind "$RUNS" "$RUNS"
mount --bind "$HOLDFAST_RAM" "$HOLDFAST_RAM"
mount -o remount,bind,ro /dev/shm
mount -o remount,bind,ro /
! touch /x 2>/dev/null
! touch /tmp/x 2>/dev/null
cd /
"$PYTHON" -c "$PROGRAM" "$RUNS/run" "$HOLDFAST_RAM"
"$PYTHON" -m holdfast stop "$RUNS/run"
"""


@pytest.mark.soak
def test_a_read_only_root_needs_a_folder_for_ram_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with host() as made:
        check(made, tmp_path)


def check(made: Host, folder: Path) -> None:
    variables = {"RUNS": str(folder), "PYTHON": sys.executable, "PROGRAM": PROGRAM}
    source = str(Path(holdfast.__file__).parent.parent)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", SCRIPT],
        env=made.environment | variables | {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has ended" in done.stdout
