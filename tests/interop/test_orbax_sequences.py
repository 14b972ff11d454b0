"""Orbax and `holdfast.interop.orbax` see the same in programs made of a seed.

A failing seed is in the name of the test. To see its program again, run `orbax_sequences.py` with
each of the two modules.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, host
from tests.interop.test_orbax import MODULES, differences, found_in
from tests.ports import free_address

SCRIPT = Path(__file__).with_name("orbax_sequences.py")
ALL_SEEDS = 300
PIECE = 50
WAIT_SECS = 900
DEVICES = "--xla_force_host_platform_device_count=4"

if importlib.util.find_spec("orbax") is None:
    pytest.skip("Orbax cannot be had here", allow_module_level=True)

from tests.interop.orbax_exceptions import REASONS  # noqa: E402

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
Seen = dict[str, dict[str, Any]]


def watched(folder: Path, first: int | str, count: int, ranks: int = 1) -> list[Seen]:
    """What each rank sees with each of the two modules in the programs of some seeds."""
    with ExitStack() as hosts, ExitStack() as ended:
        running = []
        for name in MODULES:
            address = free_address()
            made = hosts.enter_context(host())
            for rank in range(ranks):
                job = [address, str(rank)] if ranks > 1 else []
                result = folder / f"{name}.{rank}.json"
                asked = [name, folder / name, result, first, count, *job]
                process = started(made, folder / f"{name}.{rank}.log", asked)
                ended.callback(process.kill)
                running.append(process)
        for process in running:
            assert process.wait(WAIT_SECS) == 0, folder
    return [
        {name: json.loads((folder / f"{name}.{rank}.json").read_text()) for name in MODULES}
        for rank in range(ranks)
    ]


def started(made: Host, log: Path, arguments: list[Any]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, arguments)],
            env=made.environment | {"XLA_FLAGS": DEVICES},
            stdout=output,
            stderr=output,
        )


@pytest.mark.parametrize("first", range(0, ALL_SEEDS, PIECE))
def test_three_hundred_programs_see_the_same_with_both(tmp_path: Path, first: int) -> None:
    (seen,) = watched(tmp_path, first, PIECE)
    seeds = range(first, first + PIECE)
    assert [one for seed in seeds for one in found_in(seen, seed)] == []
    assert_programs_do_not_only_fail([*chain(*(seen[MODULES[0]][str(seed)] for seed in seeds))])


def assert_programs_do_not_only_fail(calls: list[Any]) -> None:
    saved = [seen for name, seen in calls if name == "save" and isinstance(seen, list) and seen[1]]
    assert len(calls) > 10 * PIECE
    assert len(saved) > 2 * PIECE
    for name in ("restore", "restore as asked", "best", "due", "delete", "reopen", "metadata"):
        assert sum(found == name for found, _ in calls) >= 3, name


def test_each_exception_is_one(tmp_path: Path) -> None:
    (seen,) = watched(tmp_path, "exceptions", 0)
    orbax, own = (seen[module] for module in MODULES)
    for name, reason in REASONS.items():
        assert differences(orbax[name], own[name], name) != [], reason


@pytest.mark.parametrize("first", range(0, ALL_SEEDS, PIECE))
def test_programs_of_two_processes_see_the_same_with_both(tmp_path: Path, first: int) -> None:
    found = [
        one
        for seen in watched(tmp_path, first, PIECE, ranks=2)
        for seed in range(first, first + PIECE)
        for one in found_in(seen, seed)
    ]
    assert found == []
