"""A real Prometheus scrapes the agents of a job over three hosts, and notices that one is lost."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import monitoring
from tests.hosts import Host, events, wait_until
from tests.monitoring.queries import dashboard_queries, filled
from tests.ports import free_address, free_ports
from tests.trainer.job import lose, some_hosts, start_job

FIRING_SECS = 30.0
WITHOUT_VALUES = ("holdfast_restore_seconds",)
"""Nothing is restored in this run."""


class Prometheus:
    """A Prometheus that scrapes each second, and evaluates the package's rules each second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        self.url = f"http://{free_address()}"
        rules = folder / "rules.yml"
        rules.write_text(monitoring.read_file(monitoring.RULES))
        config = folder / "prometheus.yml"
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(rules)],
                    "scrape_configs": [
                        {"job_name": "holdfast", "static_configs": [{"targets": targets}]}
                    ],
                }
            )
        )
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    shutil.which("prometheus") or "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def values(self, query: str) -> list[tuple[dict[str, str], float]]:
        found = self.get("query", query=query)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
            return True
        return False

    def firing(self) -> dict[str, dict[str, str]]:
        alerts = self.get("alerts")["alerts"]
        return {a["labels"]["alertname"]: a["labels"] for a in alerts if a["state"] == "firing"}

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(240)


@contextlib.contextmanager
def scraped_job(run: Path, folder: Path) -> Iterator[tuple[list[Host], Prometheus]]:
    with some_hosts(3) as hosts:
        ports = free_ports(len(hosts))
        for one, port in zip(hosts, ports, strict=True):
            one.variables["HOLDFAST_PROMETHEUS_PORT"] = str(port)
        job = start_job(hosts, run, steps=100_000, interval=5, sleep=0.05)
        prometheus = Prometheus(folder, [f"127.0.0.1:{port}" for port in ports])
        try:
            yield hosts, prometheus
        finally:
            prometheus.end()
            job.kill()


@pytest.mark.soak
@pytest.mark.slow
def test_every_panel_has_values_and_a_lost_host_fires_the_alert(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("Debian's package prometheus is not installed: apt-get install prometheus")
    run, folder = tmp_path / "run", tmp_path / "prometheus"
    folder.mkdir()
    with scraped_job(run, folder) as (hosts, prometheus):
        wait_until(prometheus.is_ready)
        wait_until(lambda: len(prometheus.values("up == 1")) == 3)
        wait_until(lambda: bool(prometheus.values('holdfast_checkpoint_age_seconds{tier="peer"}')))
        wait_until(lambda: bool(prometheus.values("holdfast:goodput_ratio:avg1h > 0")))
        wait_until(lambda: bool(prometheus.values("holdfast_survivable_domain_losses >= 1")))
        time.sleep(10)  # so that the rates have enough samples
        labels = {m["host"]: m["run"] for m, _ in prometheus.values("holdfast_attempt")}
        assert labels == {one.name: str(run) for one in hosts}
        for query in dashboard_queries():
            found = prometheus.values(filled(query))
            is_empty = any(name in query for name in WITHOUT_VALUES)
            assert bool(found) != is_empty, query
            assert all(math.isfinite(value) for _, value in found), (query, found)
        # The rule's window is longer than the run so far, so it sees less than there is.
        share = "max(rate(holdfast_steps_total[10s])) * min(holdfast_quiet_step_seconds)"
        ((_, goodput),) = prometheus.values(share)
        assert 0.2 < goodput < 1.1
        assert [value for _, value in prometheus.values("holdfast_hosts")] == [3.0]
        assert "HoldfastHostLost" not in prometheus.firing()

        lost_at = time.monotonic()
        lose(hosts[2])
        wait_until(lambda: "HoldfastHostLost" in prometheus.firing(), FIRING_SECS)
        print(f"the alert fired {time.monotonic() - lost_at:.1f} s after the host was lost")
        alert = prometheus.firing()["HoldfastHostLost"]
        assert (alert["run"], alert["severity"]) == (str(run), "critical")
        wait_until(
            lambda: (
                [m["instance"] for m, _ in prometheus.values("up == 0")]
                == [f"127.0.0.1:{hosts[2].variables['HOLDFAST_PROMETHEUS_PORT']}"]
            )
        )
        # What the leader has seen once the others end too: a host was lost, not a process.
        wait_until(lambda: "host_silent" in {event["event"] for event in events(run)})
        for one in hosts[:2]:
            one.trainers[0].kill()
        wait_until(
            lambda: bool(prometheus.values('holdfast_failures_total{cause="host_lost"} == 1'))
        )
