"""What importing Holdfast, and starting its agent, may load.

Modules are the part of a start that can be held without timing: each of those named here costs
tens of milliseconds. A timing of the whole is the row `start` of `benchmarks`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from tests.hosts import host
from tests.startup.sitecustomize import STEMS

HTTP = frozenset({"aiohttp", "http.client", "http.server", "ssl", "urllib.request"})
TERMINAL = frozenset({"rich", "click"})
FRAMEWORKS = frozenset({"jax", "jaxlib", "torch"})
ARRAYS = frozenset({"numpy", "ml_dtypes"})
PARTS = frozenset(
    {"asyncio", "logging", "msgspec", "psutil", "holdfast.trainer", "holdfast.policy", "xxhash"}
)
DECISIONS = frozenset({"holdfast.coordination.inputs", "holdfast.coordination.leader.leader"})
"""Of an agent's node. Defining them alone is a tenth of the import of a manager."""


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after a statement."""
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240
    )
    return set(json.loads(found.stdout))


def test_importing_holdfast_loads_nothing_but_itself() -> None:
    found = loaded_by("import holdfast")
    assert not found & (HTTP | TERMINAL | FRAMEWORKS | ARRAYS | PARTS)
    assert {name for name in found if name.startswith("holdfast")} == {"holdfast"}


EACH_NAME_FIRST = """
import asyncio, concurrent.futures, gc, logging, msgspec, numpy, os, psutil, sys, xxhash
import holdfast
gc.freeze()
for name in holdfast.__all__:
    if os.fork() == 0:
        assert name in dir(holdfast)
        exec(f"from holdfast import {name}")
        assert eval(name) is getattr(holdfast, name)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_each_public_name_is_found_on_first_use() -> None:
    loaded_by(EACH_NAME_FIRST)


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'checkpoint_manager'"):
        holdfast.checkpoint_manager  # type: ignore[attr-defined]  # noqa: B018


def test_policies_are_set_without_http_arrays_or_frameworks() -> None:
    found = loaded_by("from holdfast import preservation_policy, save_decision_policy")
    assert not found & (HTTP | TERMINAL | FRAMEWORKS | ARRAYS | {"asyncio", "psutil"})


def test_the_manager_is_imported_without_servers_terminals_or_a_framework() -> None:
    found = loaded_by("from holdfast import CheckpointManager")
    unwanted = HTTP | TERMINAL | FRAMEWORKS | DECISIONS | {"asyncio", "psutil", "ml_dtypes"}
    assert not found & unwanted


def test_the_agents_modules_load_no_http_arrays_terminal_or_framework() -> None:
    # OpenSSL comes with asyncio.
    found = loaded_by("import holdfast.host.process")
    assert not found & ((HTTP - {"ssl"}) | TERMINAL | FRAMEWORKS | ARRAYS)


def test_an_agent_commits_whole_arrays_without_loading_arrays_or_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host() as own:
        # A forked agent has what its stem has imported.
        monkeypatch.delenv(STEMS)
        monkeypatch.setenv("HOLDFAST_RAM", str(own.folder))
        monkeypatch.setenv("HOLDFAST_HOST", own.name)
        ram = holdfast.RamTier(linger_secs=0)
        with holdfast.CheckpointManager(tmp_path / "run", ram=ram) as manager:
            pid = own.agent().pid
            for step in range(3):
                manager.save(step, {"w": np.arange(1_000_000.0)}, force=True)
                manager.wait_until_finished(timeout_secs=240)
            found = _mapped_packages(pid)
            assert "msgspec" in found, "shows what is loaded"
            assert not found & {"numpy", "ml_dtypes", "aiohttp", "jaxlib"}


def _mapped_packages(pid: int) -> set[str]:
    """Return the packages whose shared libraries a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r"/site-packages/([A-Za-z_]+)[^\n]*\.so", maps))
