"""`ProcessHooks`: each thing that a manager installs in its process can be left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.hosts import Host

PROGRAM = """
import json, logging, os, signal, sys
hooks = []
register = os.register_at_fork
def recorded(**functions):
    modules = [str(getattr(function, "__module__", "")) for function in functions.values()]
    hooks.extend(module for module in modules if module.startswith("holdfast"))
    register(**functions)
os.register_at_fork = recorded

import numpy as np
import holdfast

process = holdfast.ProcessHooks(**json.loads(sys.argv[2]))
with holdfast.CheckpointManager(sys.argv[1], framework="numpy", process=process) as manager:
    manager.save(0, {"w": np.zeros(3)}, force=True)
    logging.getLogger("holdfast.trainer").warning("a warning")
    has_handler = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    child = os.fork()
    if child == 0:
        os._exit(7 if manager._parts.lifetime.is_inherited else 5)
    released = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print(json.dumps({"handler": has_handler, "hooks": len(hooks), "released": released}))
"""
ALL = {"preemption_signals": [], "terminal_lines": False, "fork_hooks": False}


def ran(host: Host, run: Path, **switches: Any) -> tuple[dict[str, Any], str]:
    """Return what a program has found in its process, and its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run), json.dumps(switches)],
        capture_output=True,
        text=True,
        env=os.environ | host.environment | {"HOLDFAST_LOG": "debug"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_without_switches_all_three_are_installed(one_host: Host, tmp_path: Path) -> None:
    found, lines = ran(one_host, tmp_path / "run")
    assert found == {"handler": True, "hooks": 3, "released": True}
    assert "holdfast: opened" in lines
    assert "holdfast: warning: a warning" in lines


@pytest.mark.parametrize("left_out", ALL)
def test_each_switch_leaves_out_one_thing(one_host: Host, tmp_path: Path, left_out: str) -> None:
    found, lines = ran(one_host, tmp_path / "run", **{left_out: ALL[left_out]})
    has_hooks = left_out != "fork_hooks"
    assert found == {
        "handler": left_out != "preemption_signals",
        "hooks": 3 if has_hooks else 0,
        "released": has_hooks,
    }
    assert bool(lines) == (left_out != "terminal_lines"), lines


@pytest.mark.parametrize(
    "switches",
    [{"terminal_lines": 0}, {"fork_hooks": None}, {"preemption_signals": ("SIGTERM",)}],
    ids=str,
)
def test_a_bad_switch_is_refused_by_name(switches: dict[str, Any]) -> None:
    (name,) = switches
    with pytest.raises(InvalidArgumentError, match=rf"ProcessHooks\({name}="):
        holdfast.ProcessHooks(**switches)


def test_a_signal_that_cannot_be_handled_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="SIGKILL"):
        holdfast.ProcessHooks(preemption_signals=(9,))


def test_a_manager_refuses_what_are_no_hooks(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"process=.*ProcessHooks"):
        holdfast.CheckpointManager(tmp_path / "run", process=False)  # type: ignore[arg-type]
