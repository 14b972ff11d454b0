"""An agent counts what a training has done: over HTTP, on the command line, and as a dict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import holdfast
from holdfast.environment import PROMETHEUS_VARIABLE
from holdfast.errors import InvalidArgumentError
from holdfast.observe.metrics.metric_families import METRICS
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from tests.cli.command_line import answer
from tests.hosts import Host, wait_until
from tests.ports import free_port
from tests.startup.sitecustomize import STEMS

OF_LEADING_HOST = {"holdfast_hosts", "holdfast_silent_hosts", "holdfast_survivable_domain_losses"}


def scraped_as(host: str, url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Host": host})
    with urllib.request.urlopen(request, timeout=10) as response:
        found: bytes = response.read()
    return found


def scraped(url: str) -> dict[str, float]:
    """The values by name and labels, without those of the run and the host."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("run", "host")}
            found[sample.name + ("" if not labels else str(labels))] = sample.value
    return found


def url_of(one: Host) -> str:
    url = one.agent().prometheus_url
    assert url is not None
    return url


def test_the_counts_are_those_of_the_training(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(
        run,
        framework="numpy",
        save_decision_policy=FixedIntervalPolicy(10),
        network=holdfast.HostNetwork(prometheus_port=0),
    ) as manager:
        state = {"w": np.arange(1000.0)}
        for step in range(31):
            with manager.waiting("data"):
                pass
            manager.save(step, state)
            manager.wait_until_finished()
        wait_until(lambda: manager.stats()["holdfast/step"] == 30)
        url = url_of(one_host)
        wait_until(lambda: "holdfast_survivable_domain_losses" in scraped(url))
        found, flat = scraped(url), manager.stats()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            scraped_as("evil.example", url)
        shown = answer(one_host, "stats", run)["agents"]
    assert found["holdfast_step"] == 30
    assert found["holdfast_checkpoint_committed_total{'tier': 'durable'}"] == 4
    assert found["holdfast_commit_duration_seconds_count{'tier': 'ram'}"] == 4
    assert found["holdfast_checkpoint_written_bytes_total{'tier': 'durable'}"] >= 4 * 8000
    assert found["holdfast_waiting_seconds_total{'reason': 'data'}"] > 0
    assert 0 < found["holdfast_save_blocked_seconds_total"] < 60
    assert found["holdfast_hosts"] == found["holdfast_survivable_domain_losses"] == 1
    assert flat["holdfast/checkpoint_committed_total/durable"] == 4.0
    assert all(type(value) is float for value in flat.values())
    (agent,) = shown
    assert (agent["run"], agent["host"], agent["prometheus_url"]) == (str(run), one_host.name, url)
    assert agent["stats"].keys() >= flat.keys()


def test_every_metric_is_served_in_the_end(one_host: Host, tmp_path: Path) -> None:
    with holdfast.CheckpointManager(
        tmp_path / "run", framework="numpy", network=holdfast.HostNetwork(prometheus_port=0)
    ) as manager:
        url = url_of(one_host)
        for step in range(100):
            manager.save(step, {"w": np.arange(10.0) + step})
        manager.wait_until_finished()
        for step in range(100, 150):
            manager.save(step, {"w": np.arange(10.0) + step})
            # Quiet steps are those that end while nothing is being saved.
            manager.wait_until_finished()

        def names() -> set[str]:
            return {name.partition("{")[0] for name in scraped(url)}

        expected = {
            name + ("_count" if metric.kind == "histogram" else "")
            for name, metric in METRICS.items()
        } - {"holdfast_quiet_step_seconds"}
        wait_until(lambda: expected <= names())
        assert names() >= OF_LEADING_HOST


def test_metrics_that_cannot_be_served_are_a_warning_and_the_training_goes_on(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with holdfast.CheckpointManager(
        tmp_path / "a", framework="numpy", network=holdfast.HostNetwork(prometheus_port=port)
    ):
        assert url_of(one_host) == f"http://127.0.0.1:{port}/metrics"
        with holdfast.CheckpointManager(
            tmp_path / "b", framework="numpy", network=holdfast.HostNetwork(prometheus_port=port)
        ) as other:
            assert other.save(0, {"w": np.zeros(3)})
            out = subprocess.run(
                [sys.executable, "-m", "holdfast", "stats", str(tmp_path / "b")],
                env=one_host.environment,
                capture_output=True,
                text=True,
            ).stdout
            assert f"not served; serve metrics at 127.0.0.1, port {port}" in out
            assert "set HostNetwork" not in out
    assert f"serves no metrics: serve metrics at 127.0.0.1, port {port}" in caplog.text
    assert "Address already in use" in caplog.text


def test_an_agent_that_is_not_asked_imports_no_exporter_and_serves_nothing(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A forked agent has what its stem has imported.
    monkeypatch.delenv(STEMS)
    with holdfast.CheckpointManager(tmp_path / "run", framework="numpy") as manager:
        agent = one_host.agent()
        assert agent.prometheus_url is None
        maps = Path(f"/proc/{agent.pid}/maps").read_text()
        assert "aiohttp" not in maps  # its parser is a compiled module
        assert manager.stats()["holdfast/trainers"] == 1.0
    with pytest.raises(InvalidArgumentError, match="closed"):
        manager.stats()


def test_the_port_may_come_from_the_environment(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv(PROMETHEUS_VARIABLE, str(port))
    with holdfast.CheckpointManager(tmp_path / "run", framework="numpy", ram=None):
        assert url_of(one_host) == f"http://127.0.0.1:{port}/metrics"
    for wrong in ("many", "-1", "70000", "9464a"):
        monkeypatch.setenv(PROMETHEUS_VARIABLE, wrong)
        with pytest.raises(InvalidArgumentError, match=PROMETHEUS_VARIABLE):
            holdfast.CheckpointManager(tmp_path / "run", framework="numpy")
    with pytest.raises(InvalidArgumentError, match="prometheus_port"):
        holdfast.HostNetwork(prometheus_port=65536)


def test_without_the_package_a_port_is_refused_with_the_extra_to_install(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'prometheus_client' else find(n, *a)\n"
        "import holdfast\n"
        "holdfast.CheckpointManager(sys.argv[1], framework='numpy',"
        " network=holdfast.HostNetwork(prometheus_port=0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=os.environ | {"HOLDFAST_RAM": str(tmp_path)},
        check=False,
    )
    assert "install holdfast-checkpoint[prometheus]" in done.stderr


def test_the_files_are_printed_as_they_are(one_host: Host) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "stats", "--dashboard"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["title"] == "Holdfast"
