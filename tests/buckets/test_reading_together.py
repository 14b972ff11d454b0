"""Processes of a job that restore from a bucket read each byte once in all."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import CheckpointManager
from holdfast.format.names import EXCHANGE
from tests.buckets.fault_proxy import FaultProxy
from tests.buckets.numpy_rank import digests
from tests.hosts import Host, wait_until
from tests.trainer.job import lose, some_hosts, start_job

RANK = Path(__file__).with_name("numpy_rank.py")
MIB = 1024 * 1024
LARGE_BYTES = 40 * MIB
END_SECS = 240.0
JOB_SECS = 240.0
"""Four processes that import PyTorch on two busy cores take a minute and more."""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with some_hosts(3) as found:
        for one in found:
            one.variables["HOLDFAST_STATE"] = str(one.folder / "state")
        yield found


@pytest.fixture
def state(one_host: Host, proxied_url: str) -> dict[str, np.ndarray]:
    """The state of two checkpoints of a run that is durable, and in the RAM of no host."""
    random = np.random.default_rng(0)
    found = {
        "large": random.integers(0, 255, LARGE_BYTES, np.uint8),
        **{f"small-{i}": random.integers(0, 255, 5000, np.uint8) for i in range(500)},
    }
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.save(1, {"large": found["large"][:MIB]}, force=True)
        manager.save(2, found, force=True)
    return found


def images_read(proxy: FaultProxy) -> int:
    return sum(size_bytes for path, size_bytes in proxy.read if "safetensors" in path)


def start_ranks(hosts: Sequence[Host], folder: Path, url: str, **todo: Any) -> list[Any]:
    folder.mkdir()
    return [
        one.start(RANK, folder, len(hosts), rank, url, json.dumps(todo), stem="numpy")
        for rank, one in enumerate(hosts)
    ]


def results(ranks: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for rank in ranks:
        out, err = rank.communicate(timeout=END_SECS)
        assert rank.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


def left_in_ram(hosts: Sequence[Host]) -> list[Path]:
    return [path for one in hosts for path in one.folder.glob(f"*/ram/{EXCHANGE}/*")]


def test_four_ranks_of_one_host_read_a_replicated_state_once(
    state: dict, proxy: FaultProxy, proxied_url: str, hosts: list[Host], tmp_path: Path
) -> None:
    proxy.read.clear()
    found = results(start_ranks(hosts[:1] * 4, tmp_path / "job", proxied_url))
    size_bytes = sum(array.nbytes for array in state.values())
    assert size_bytes <= images_read(proxy) <= 1.05 * size_bytes
    assert [one["digests"] for one in found] == [digests(state)] * 4
    assert [one["passed_over"] for one in found] == [[]] * 4
    assert [one["sources"] for one in found] == [{"durable": size_bytes}] * 4
    assert sum(one["shared"] for one in found) == 3 * size_bytes
    assert left_in_ram(hosts) == []


def test_ranks_of_three_hosts_read_it_once_and_agents_pass_it_on(
    state: dict, proxy: FaultProxy, proxied_url: str, hosts: list[Host], tmp_path: Path
) -> None:
    proxy.read.clear()
    ranks = [hosts[0], hosts[1], hosts[2], hosts[0]]
    found = results(start_ranks(ranks, tmp_path / "job", proxied_url))
    size_bytes = sum(array.nbytes for array in state.values())
    assert size_bytes <= images_read(proxy) <= 1.05 * size_bytes
    assert [one["digests"] for one in found] == [digests(state)] * 4
    assert [one["passed_over"] for one in found] == [[]] * 4
    assert left_in_ram(hosts) == []


def test_ranks_that_want_different_arrays_read_these_once(
    state: dict, proxy: FaultProxy, proxied_url: str, hosts: list[Host], tmp_path: Path
) -> None:
    proxy.read.clear()
    only = [["large"], ["small-1"], ["large", "small-7"]]
    found = results(start_ranks(hosts[:1] * 3, tmp_path / "job", proxied_url, only=only, step=2))
    everything = digests(state)
    assert [one["digests"] for one in found] == [
        {name: everything[name] for name in names} for names in only
    ]
    assert images_read(proxy) == LARGE_BYTES + 2 * 5000


@pytest.mark.soak
def test_without_ram_each_rank_reads_by_itself(
    state: dict, proxy: FaultProxy, proxied_url: str, hosts: list[Host], tmp_path: Path
) -> None:
    proxy.read.clear()
    found = results(start_ranks(hosts[:1] * 2, tmp_path / "job", proxied_url, step=1, ram=False))
    assert [one["shared"] for one in found] == [0, 0]
    assert images_read(proxy) == 2 * MIB


@pytest.mark.soak
def test_after_a_rank_was_killed_the_others_end_and_a_new_start_restores(
    state: dict, proxy: FaultProxy, proxied_url: str, hosts: list[Host], tmp_path: Path
) -> None:
    proxy.rate = 20e6
    proxy.read.clear()
    ranks = start_ranks(hosts[:1] * 4, tmp_path / "job", proxied_url)
    wait_until(lambda: images_read(proxy) > 0)
    os.kill(ranks[3].pid, signal.SIGKILL)
    killed = time.monotonic()
    found = results(ranks[:3])
    assert time.monotonic() - killed < 60
    assert [one.get("error") for one in found] == ["ProcessLostError"] * 3
    ranks[3].communicate()
    proxy.rate = None
    again = results(start_ranks(hosts[:1] * 4, tmp_path / "again", proxied_url))
    assert [one["digests"] for one in again] == [digests(state)] * 4
    assert left_in_ram(hosts) == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("places", ["aaaa", "abc"])
def test_jobs_of_jax_and_pytorch_read_each_byte_once_after_all_hosts_were_lost(
    framework: str,
    is_sharded: bool,
    places: str,
    proxy: FaultProxy,
    proxied_url: str,
    hosts: list[Host],
) -> None:
    ranks = [hosts["abc".index(place)] for place in places]
    todo = {"framework": framework, "big_mib": 64, "sharded": is_sharded, "interval": 4}
    start_job(ranks, proxied_url, steps=5, **todo).results(JOB_SECS)
    lose(*hosts)
    proxy.read.clear()
    found = start_job(ranks, proxied_url, steps=0, **todo).results(JOB_SECS)
    assert [(one["start"], one["right"]) for one in found] == [(5, True)] * len(ranks)
    assert 64 * MIB <= images_read(proxy) <= 1.05 * 65 * MIB
    assert all(not one["passed_over"] for one in found)
    paths = [path for path, _ in proxy.read if "safetensors" in path]
    assert len(paths) <= 64 // 16 + 4 * len([*itertools.groupby(sorted(paths))])
    assert left_in_ram(hosts) == []
