"""What a start costs: importing Holdfast, opening a new run with a new agent, opening it again.

Other processes share the machine's cores, so every figure comes with what an empty interpreter took
in the same round, and with processor time (user and system) beside wall time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.host.wire.client import status_of
from holdfast.local_agent.place import roots

RUNS = 15
END_SECS = 30.0
IMPORTS = {
    "empty": "pass",
    "holdfast": "import holdfast",
    "manager": "from holdfast import CheckpointManager",
}
TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


def start(*, directory: str, runs: int = RUNS) -> dict[str, Any]:
    """Measure each import in processes of its own, then `runs` pairs of openings in this one.

    Returns:
        By name, the seconds of each run: `wall_secs` and `processor_secs`; of the openings also
        `agent_secs`, the processor time of the new agent when the first manager was open.
    """
    imports = {name: _imports([sys.executable, "-c", code], runs) for name, code in IMPORTS.items()}
    return {"imports": imports, **_openings(Path(directory), runs)}


def _imports(command: Sequence[str], runs: int) -> dict[str, list[float]]:
    wall_secs, processor_secs = [], []
    for _ in range(runs):
        before, began = os.times(), time.perf_counter()
        subprocess.run(command, check=True)
        wall_secs.append(time.perf_counter() - began)
        after = os.times()
        used = after.children_user + after.children_system
        processor_secs.append(used - before.children_user - before.children_system)
    return {"wall_secs": wall_secs, "processor_secs": processor_secs}


def _openings(folder: Path, runs: int) -> dict[str, Any]:
    import jax

    import holdfast

    jax.devices()
    first: dict[str, list[float]] = {"wall_secs": [], "agent_secs": []}
    second: dict[str, list[float]] = {"wall_secs": []}
    for number in range(runs):
        run = folder / f"run-{number}"
        began = time.perf_counter()
        manager = holdfast.CheckpointManager(run)
        opened_secs = time.perf_counter() - began
        pid = _agent_pid()
        first["agent_secs"].append(_processor_secs(pid))
        began = time.perf_counter()
        manager.close()
        first["wall_secs"].append(opened_secs + time.perf_counter() - began)
        began = time.perf_counter()
        with holdfast.CheckpointManager(run, ram=holdfast.RamTier(linger_secs=0)):
            second["wall_secs"].append(time.perf_counter() - began)
        _wait_for_end(pid)
    return {"first": first, "second": second}


def _agent_pid() -> int:
    found = [
        status_of(folder) for folder in roots()[0].iterdir() if not folder.name.startswith(".")
    ]
    (status,) = (one for one in found if one is not None)
    return status.pid


def _processor_secs(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SEC


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + END_SECS
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"agent {pid} did not leave within {END_SECS:.0f} s")
        time.sleep(0.01)
