"""The demo as a user runs it, in small: killed, its agent killed, preempted, and nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import host
from tests.trainer.frameworks import TORCH


# `make demo` is the same in large, and other tests have its trainers, its report and its ends.
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["jax", TORCH])
def test_the_demo_is_bit_identical_with_the_agent_killed_as_well(
    tmp_path: Path, framework: str
) -> None:
    command = [sys.executable, "-m", "holdfast", "demo", "--kill-agent", "--json"]
    command += ["--framework", framework]
    options = ["--directory", str(tmp_path / "demo"), "--steps", "24", "--interval-secs", "0.3"]
    # Each of its trainers compiles the same program.
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with host() as made:
        done = subprocess.run(
            [*command, *options],
            env={k: v for k, v in made.environment.items() if k != "XLA_FLAGS"} | compiled,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert made.agents() == []
    assert done.returncode == 0, done.stderr[-3000:]
    *_, identity, link = done.stderr.rstrip().splitlines()
    assert identity.startswith("bit-identical: parameters yes")
    page = tmp_path / "demo" / "report.html"
    assert link.endswith(f": {page.as_uri()}")
    assert b"Failures" in page.read_bytes()
    result = json.loads(done.stdout)
    assert all(result["identity"].values())
    assert [failure["cause"] for failure in result["report"]["failures"]] == ["lost", "preempted"]
    # For people, it is the report of `holdfast report`.
    assert f"$ holdfast report {tmp_path}/demo/interrupted --html {page}" in done.stderr
    assert "process lost" in done.stderr
