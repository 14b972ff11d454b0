"""Checkpoints of released versions of Orbax's second interface are read bit for bit.

Each version is installed into an environment of its own, which is removed after it has written.
The versions are the first and the last with this interface, and those that changed what is on disk.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.hosts import Host

FOLDER = Path(__file__).parent
DEVICES = "--xla_force_host_platform_device_count=8"
INSTALL_SECS = 600
WAIT_SECS = 300

VERSIONS = {
    "0.11.7": "0.5.0",  # the first one: trees alone, and custom metadata named `custom`
    "0.11.8": "0.5.3",  # custom metadata named `custom_metadata`
    "0.11.11": "0.5.3",  # checkpointables
    "0.11.13": "0.5.3",  # the checkpointer of trainings, objects with a state; JSON in `metadata`
    "0.11.14": "0.6.2",  # JSON in `data.json`
    "0.11.19": "0.6.2",  # a file that marks a checkpoint
    "0.11.34": "0.9.2",  # layouts, among them those of the first interface
    "0.11.40": "0.9.2",  # the last one that names a tree `pytree`
    "0.12.0": "0.9.2",  # which is named `state`
    "0.12.8": "0.10.2",
}
"""Versions of Orbax, each with one of JAX that it runs with."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(INSTALL_SECS + 2 * WAIT_SECS + 60),
    pytest.mark.skipif(
        importlib.util.find_spec("orbax") is None, reason="Orbax cannot be had here"
    ),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_release_has_written_is_read_and_imported(
    one_host: Host, tmp_path: Path, version: str
) -> None:
    written, result = tmp_path / "written", tmp_path / "seen.json"
    written.mkdir()
    environment = one_host.environment | {"XLA_FLAGS": DEVICES}
    with tempfile.TemporaryDirectory() as place:
        python = install(Path(place), version)
        alone = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
        run([python, "-W", "ignore", FOLDER / "orbax_v1_writer.py", written], alone)
    reader = FOLDER / "orbax_v1_reader.py"
    run([sys.executable, "-W", "ignore", reader, written, result], environment)
    assert json.loads(result.read_text()) == []


def install(folder: Path, version: str) -> Path:
    """Make an environment with a version of Orbax, and return its interpreter."""
    jax = VERSIONS[version]
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=WAIT_SECS)
    packages = [f"orbax-checkpoint=={version}", f"jax=={jax}", f"jaxlib=={jax}"]
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-compile", *packages],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECS,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gives no reason"])[-1]
        pytest.skip(f"Orbax {version} with JAX {jax} cannot be installed here: {reason}")
    return python


def run(command: list[object], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
