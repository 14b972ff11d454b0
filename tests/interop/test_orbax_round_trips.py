"""Checkpoints of Orbax are imported, and runs are exported to it, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.making import memory_folder
from tests.hosts import host
from tests.made_once import made_once

SCRIPT = Path(__file__).with_name("orbax_round_trips.py")

if importlib.util.find_spec("orbax") is None:
    pytest.skip("Orbax cannot be had here", allow_module_level=True)

from tests.interop.orbax_round_trips import TRIPS, differences  # noqa: E402

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What is different after each of the round trips."""
    seen: dict[str, list[str]] = made_once(tmp_path_factory, "trips", see_trips)
    return seen


def see_trips() -> dict[str, list[str]]:
    # In memory: Orbax waits for the disk at each save.
    with host() as made, memory_folder() as place:
        folder = Path(place)
        subprocess.run(
            [sys.executable, "-W", "ignore", SCRIPT, folder / "trips", folder / "seen.json"],
            env=made.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=850,
            check=True,
        )
        found: dict[str, list[str]] = json.loads((folder / "seen.json").read_text())
        return found


@pytest.mark.parametrize("name", TRIPS)
def test_trip(seen: dict[str, list[str]], name: str) -> None:
    assert seen[name] == []


def test_differences_are_found() -> None:
    assert differences({"a": [1, 2.0]}, {"a": [1, 2.5]}) == ["/a/1: 2.0 2.5"]
    assert differences({"a": 1}, {"a": True}) != []
    assert differences({"a": 1}, {"b": 1}) != []
