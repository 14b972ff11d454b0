"""Programs for Orbax see the same with `holdfast.interop.orbax` in its place.

They are programs as people write them, and some made of seeds, of which
`test_orbax_sequences.py` runs more. Both kinds run in one process for each of the two modules.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.making import memory_folder
from tests.hosts import host
from tests.interop.orbax_v1_programs import PROGRAMS
from tests.made_once import made_once

SCRIPT = Path(__file__).with_name("orbax_sequences.py")
SEEDS = 2
DEVICES = "--xla_force_host_platform_device_count=8"
ALWAYS = {"Exception", "BaseException", "object"}
MODULES = ("orbax.checkpoint", "holdfast.interop.orbax")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("orbax") is None, reason="Orbax cannot be had here"
    ),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the programs, and those of the first seeds, see with each of the two modules."""
    seen: dict[str, dict[str, Any]] = made_once(tmp_path_factory, "programs", see_programs)
    return seen


def see_programs() -> dict[str, dict[str, Any]]:
    # In memory: Orbax waits for the disk at each save.
    with host() as made, memory_folder() as place:
        folder = Path(place)
        running = [
            subprocess.Popen(
                [
                    *(sys.executable, "-W", "ignore", SCRIPT),
                    *(name, folder / name, folder / f"{name}.json", "programs", str(SEEDS)),
                ],
                env=made.environment | {"XLA_FLAGS": DEVICES},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name in MODULES
        ]
        for process in running:
            try:
                assert process.wait(850) == 0
            finally:
                process.kill()
        return {name: json.loads((folder / f"{name}.json").read_text()) for name in MODULES}


def differences(orbax: Any, own: Any, place: str) -> list[str]:
    """The places at which the two saw different things; our errors may be of further classes."""
    if isinstance(orbax, dict) and isinstance(own, dict) and {"error"} <= {*orbax} & {*own}:
        return [] if {*orbax["error"]} - ALWAYS <= {*own["error"]} else [f"{place}: {orbax} {own}"]
    if isinstance(orbax, list) and isinstance(own, list) and len(orbax) == len(own):
        pairs = enumerate(zip(orbax, own, strict=True))
        return [found for i, (a, b) in pairs for found in differences(a, b, f"{place}/{i}")]
    return [] if orbax == own else [f"{place}: {orbax} {own}"]


def found_in(seen: dict[str, dict[str, Any]], seed: int) -> list[str]:
    """Where the two saw different things in the program of a seed, or where it stopped."""
    orbax, own = (seen[module][str(seed)] for module in MODULES)
    stopped = [str(call) for call in [*orbax, *own] if call[0] == "stopped"]
    return [f"seed {seed}: {one}" for one in [*stopped, *differences(orbax, own, "call")]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_the_same_with_both(seen: dict[str, dict[str, Any]], name: str) -> None:
    orbax, own = (seen[module][name] for module in MODULES)
    assert "stopped" not in orbax, orbax
    assert differences(orbax, own, name) == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_program_made_of_a_seed_sees_the_same_with_both(
    seen: dict[str, dict[str, Any]], seed: int
) -> None:
    assert found_in(seen, seed) == []


def test_differences_are_found() -> None:
    assert differences([1, {"error": ["ValueError"]}], [1, {"error": ["KeyError"]}], "p") != []
    assert differences([1, 2], [1, 3], "p") == ["p/1: 2 3"]


def test_nothing_of_it_is_imported_unasked() -> None:
    code = (
        "import sys, holdfast; holdfast.CheckpointManager; print('holdfast.interop' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "False"
