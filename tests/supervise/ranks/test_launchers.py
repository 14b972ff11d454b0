"""Launchers of several hosts lead, follow and replace each other: real processes on loopback.

The ranks are of a few lines, without PyTorch; `test_lost_hosts_of_ranks` has trainings.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.supervise.ranks import membership
from holdfast.supervise.ranks.launcher_config import LauncherConfig
from holdfast.supervise.ranks.membership import Settings
from tests.hosts import ROOT, wait_until

RIG = Path(__file__).parent / "launcher_rig.py"
_numbers = itertools.count()


class Cluster:
    """The launchers of a job, and what their processes have printed."""

    def __init__(self, folder: Path, settings: Settings, last: int) -> None:
        self.folder, self.settings = folder, settings
        self.does = json.dumps({"last": last})
        # No other process uses the ports of this address, also not for connections of its own.
        pid = os.getpid()
        self.address = f"127.{64 + (pid >> 16) % 64}.{(pid >> 8) % 256}.{pid % 256}"
        first = 20_000 + 10 * next(_numbers)
        self.addresses = tuple((self.address, first + host) for host in range(settings.hosts))
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, host: int, settings: Settings | None = None) -> None:
        config = LauncherConfig(
            settings=settings or self.settings, addresses=self.addresses, own=host
        )
        with (
            (self.folder / f"out-{host}").open("ab") as out,
            (self.folder / f"err-{host}").open("ab") as err,
        ):
            launcher = subprocess.Popen(
                [sys.executable, RIG, msgspec.json.encode(config).decode(), self.does],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.launchers[host] = launcher
        self.started.append(launcher)

    def signal(self, host: int, number: int) -> None:
        """Send a signal to a host's launcher and to all of its processes."""
        os.killpg(self.launchers[host].pid, number)

    def kill(self, host: int) -> None:
        self.signal(host, signal.SIGKILL)
        self.launchers.pop(host).wait()

    def events(self, event: str) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob("out-*"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [found for found in map(json.loads, lines) if found["event"] == event]

    def generation(self, number: int) -> dict[int, dict[str, Any]]:
        """Return the ranks of a generation, by rank."""
        assigned = self.events("assigned")
        return {each["rank"]: each for each in assigned if each["generation"] == number}

    def wait_for(self, number: int, ranks: int) -> dict[int, dict[str, Any]]:
        wait_until(lambda: len(self.generation(number)) == ranks)
        return self.generation(number)

    def notes(self, host: int) -> str:
        return (self.folder / f"err-{host}").read_text()

    def codes(self) -> dict[int, int]:
        """Wait for all launchers, and return their exit codes."""
        return {host: launcher.wait(240) for host, launcher in self.launchers.items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(last: int, hosts: int, **settings: Any) -> Cluster:
        whole = {"ranks": 4, "spares": 0, "ranks_min": 4, "leave_secs": 5.0} | settings
        made.append(Cluster(tmp_path, Settings(hosts=hosts, **whole), last))
        for host in range(hosts):
            made[-1].start(host)
        return made[-1]

    yield make
    for each in made:
        for launcher in each.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def test_hosts_train_together_and_end_together(cluster: Callable[..., Cluster]) -> None:
    job = cluster(last=1, hosts=3, spare_hosts=1)
    assert job.codes() == {0: 0, 1: 0, 2: 0}
    ranks = job.generation(1)
    assert [(ranks[i]["host"], ranks[i]["seat"]) for i in range(4)] == [
        ("0", 0),
        ("0", 1),
        ("1", 0),
        ("1", 1),
    ]
    assert {each["world_size"] for each in ranks.values()} == {4}
    assert len(job.events("released")) == 6


@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_host_takes_the_ranks_of_a_lost_host(
    lost: int, cluster: Callable[..., Cluster]
) -> None:
    job = cluster(last=2, hosts=3, spare_hosts=1)
    before = job.wait_for(1, 4)
    job.kill(lost)
    after = job.wait_for(2, 4)
    kept = [rank for rank, each in before.items() if each["host"] != str(lost)]
    assert [after[rank]["pid"] for rank in kept] == [before[rank]["pid"] for rank in kept]
    assert {after[rank]["host"] for rank in after if rank not in kept} == {"2"}
    assert {tuple(each["lost"]) for each in after.values()} == {((0, 1), (2, 3))[lost]}
    assert set(job.codes().values()) == {0}


def test_a_silent_host_is_lost_and_its_ranks_wait_when_it_is_back(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(last=3, hosts=3, spare_hosts=1)
    before = job.wait_for(1, 4)
    job.signal(0, signal.SIGSTOP)
    after = job.wait_for(2, 4)
    assert {each["host"] for each in after.values()} == {"1", "2"}
    job.signal(0, signal.SIGCONT)
    pids = {before[rank]["pid"] for rank in (0, 1)}
    wait_until(lambda: pids <= {each["pid"] for each in job.events("left")})
    # It waits as a spare host now, for the next one that is lost.
    job.kill(1)
    last = job.wait_for(3, 4)
    assert {each["host"] for each in last.values()} == {"0", "2"}
    assert pids < {each["pid"] for each in last.values()}
    assert job.codes() == {0: 0, 2: 0}


def test_a_host_that_is_started_again_gives_the_lost_ranks_their_places(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(last=2, hosts=2)
    before = job.wait_for(1, 4)
    job.kill(1)
    wait_until(lambda: "is lost" in job.notes(0))
    assert len(job.generation(2)) == 0
    job.start(1)
    after = job.wait_for(2, 4)
    assert [after[rank]["pid"] for rank in (0, 1)] == [before[rank]["pid"] for rank in (0, 1)]
    assert {after[rank]["host"] for rank in (2, 3)} == {"1"}
    assert job.codes() == {0: 0, 1: 0}


def test_the_other_half_of_the_hosts_does_not_go_on(cluster: Callable[..., Cluster]) -> None:
    job = cluster(last=2, hosts=2, ranks_min=2)
    job.wait_for(1, 4)
    job.kill(0)
    wait_until(lambda: len(job.events("left")) == 2)
    # It waits for the other one, which is in the list before it.
    time.sleep(2.0)
    assert len(job.generation(2)) == 0
    job.start(0)
    after = job.wait_for(2, 4)
    assert {each["host"] for each in after.values()} == {"0", "1"}
    assert job.codes() == {0: 0, 1: 0}


def test_fewer_hosts_go_on_at_once(cluster: Callable[..., Cluster]) -> None:
    job = cluster(last=2, hosts=2, ranks_min=2)
    job.wait_for(1, 4)
    job.kill(1)
    after = job.wait_for(2, 2)
    assert {each["host"] for each in after.values()} == {"0"}
    assert job.codes() == {0: 0}


def test_a_host_with_other_options_stays_outside(cluster: Callable[..., Cluster]) -> None:
    job = cluster(last=2, hosts=2)
    job.wait_for(1, 4)
    job.kill(1)
    job.start(1, Settings(ranks=4, spares=3, ranks_min=4, leave_secs=5.0, hosts=2))
    for host in (0, 1):
        wait_until(lambda host=host: "started with other options" in job.notes(host))
    job.kill(1)
    job.start(1)
    assert job.codes() == {0: 0, 1: 0}


def test_a_signal_to_all_hosts_ends_the_job(cluster: Callable[..., Cluster]) -> None:
    job = cluster(last=2, hosts=2)
    job.wait_for(1, 4)
    for host in (0, 1):
        job.signal(host, signal.SIGTERM)
    assert job.codes() == {0: 128 + signal.SIGTERM, 1: 128 + signal.SIGTERM}


def test_a_host_whose_only_process_was_killed_starts_another(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(last=2, hosts=2, ranks=2, ranks_min=2)
    before = job.wait_for(1, 2)
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = job.wait_for(2, 2)
    assert after[0]["pid"] == before[0]["pid"]
    assert after[1]["host"] == "1"
    assert job.codes() == {0: 0, 1: 0}


def test_a_host_that_has_lost_all_its_processes_has_not_finished(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(last=2, hosts=2, ranks=2, ranks_min=1)
    before = job.wait_for(1, 2)
    os.kill(before[1]["pid"], signal.SIGKILL)
    job.wait_for(2, 1)
    assert job.codes() == {0: 0, 1: 128 + signal.SIGKILL}


def test_a_host_that_came_back_leads_at_once_when_the_leader_is_lost(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(last=3, hosts=3, spare_hosts=1)
    job.wait_for(1, 4)
    job.kill(1)
    job.wait_for(2, 4)
    # The other one has joined too if host 1 has led before.
    joined_count = job.notes(0).count("has joined")
    job.start(1)
    wait_until(lambda: job.notes(0).count("has joined") > joined_count)
    lost_secs = time.monotonic()
    job.kill(0)
    job.wait_for(3, 4)
    assert time.monotonic() - lost_secs < membership.START_SECS / 2
    assert f"host {job.address} is lost" in job.notes(1)
    assert job.codes() == {1: 0, 2: 0}


def test_a_host_with_the_list_in_another_order_is_told_and_nothing_repeats(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(last=1, hosts=3, spare_hosts=1)
    for host in (0, 1, 2):
        job.kill(host)
    first, second, third = job.addresses
    job.start(0)
    job.addresses = (second, first, third)
    job.start(2)
    for host in (0, 2):
        wait_until(lambda host=host: "started with other options" in job.notes(host))
    time.sleep(2.0)
    assert job.notes(0).count("started with other options") == 1
    assert "is lost" not in job.notes(0) + job.notes(2)


def test_a_rank_is_replaced_on_its_host_and_not_by_a_spare_host(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(last=2, hosts=3, spare_hosts=1)
    before = job.wait_for(1, 4)
    os.kill(before[3]["pid"], signal.SIGKILL)
    after = job.wait_for(2, 4)
    assert {after[rank]["host"] for rank in (2, 3)} == {"1"}
    assert job.codes() == {0: 0, 1: 0, 2: 0}


def test_what_the_job_waits_for_is_told(cluster: Callable[..., Cluster]) -> None:
    job = cluster(last=1, hosts=3, spare_hosts=1)
    job.kill(2)
    wait_until(lambda: f"waiting for host {job.address}" in job.notes(0))
    assert len(job.generation(1)) == 0
    job.start(2)
    assert job.codes() == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize(
    "garbage",
    [
        b'{"type":"Ended","member":1,"reason":"\xff"}\n',
        b'{"type":"Hello","x":' + b"[" * 200_000 + b"\n",
        b'{"type":"Hello","host":1,"options":"","addresses":[]}\n' * 2,
        b"x" * (3 << 20),
    ],
    ids=["no text", "deep", "twice", "long"],
)
def test_bytes_that_are_no_messages_close_their_connection(
    garbage: bytes, cluster: Callable[..., Cluster]
) -> None:
    job = cluster(last=2, hosts=2)
    job.wait_for(1, 4)
    with socket.create_connection(job.addresses[0]) as stranger:
        stranger.settimeout(30.0)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(garbage)
            while stranger.recv(1 << 16):
                pass
    assert job.launchers[0].poll() is None
    assert len(job.generation(2)) == 0
    job.kill(1)
    job.start(1)
    assert job.codes() == {0: 0, 1: 0}
