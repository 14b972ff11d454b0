"""Environment variables that are none of Holdfast's are named, with the nearest one that is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast
from holdfast import environment
from holdfast.environment import VARIABLES, unknown_variables
from tests.cli.command_line import holdfast as run_command
from tests.hosts import host

SOURCE = Path(holdfast.__file__).parent


def test_unknown_variables_have_the_nearest_name() -> None:
    assert unknown_variables(
        {
            "HOLDFAST_RAN": "/ram",
            "HOLDFAST_PROMETEUS_PORT": "9464",
            "HOLDFAST_HOST": "a",
            "HOLDFAST_QQQQQQ": "1",
            "PATH": "/bin",
        }
    ) == {
        "HOLDFAST_PROMETEUS_PORT": "HOLDFAST_PROMETHEUS_PORT",
        "HOLDFAST_QQQQQQ": None,
        "HOLDFAST_RAN": "HOLDFAST_RAM",
    }


def test_variables_of_a_kubernetes_service_are_left_alone() -> None:
    service = {
        "HOLDFAST_SERVICE_HOST": "10.0.0.1",
        "HOLDFAST_SERVICE_PORT": "80",
        "HOLDFAST_PAGE_SERVICE_PORT_HTTP": "80",
        "HOLDFAST_PORT": "tcp://10.0.0.1:80",
        "HOLDFAST_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert unknown_variables(service) == {}


def test_the_table_has_every_variable_that_the_source_names() -> None:
    sources = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert set(re.findall(r'= "(HOLDFAST_\w+)"', sources)) == set(VARIABLES)


def test_the_first_opening_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with host() as one:
        for name, value in {"HOLDFAST_RAM": str(one.folder), "HOLDFAST_HOST": one.name}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOLDFAST_INTERFACES", "eth0")
        environment.warn_unknown.cache_clear()
        for name in ("a", "b"):
            holdfast.CheckpointManager(tmp_path / name, framework="numpy").close()
    (line,) = [r.getMessage() for r in caplog.records if "which is not read" in r.getMessage()]
    assert "HOLDFAST_INTERFACES" in line
    assert "expected HOLDFAST_INTERFACE;" in line


def test_each_command_warns() -> None:
    with host() as one:
        one.variables["HOLDFAST_HOSTS"] = "a"
        shown = run_command(one, "run", "--", "true").stderr
    assert "warning: the environment has HOLDFAST_HOSTS, which is not read: expected" in shown
