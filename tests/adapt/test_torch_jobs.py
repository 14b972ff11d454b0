"""A job of PyTorch under torchrun, and its checkpoint read without PyTorch."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import ReplicasDiffer
from holdfast.observe.replica_differences import last_difference
from tests.hosts import Host, wait_until
from tests.ports import free_address
from tests.trainer.job import has_copies, lose, some_hosts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch cannot be had here"
)


def start_workers(
    one: Host, count: int, module: str, run: Path, **variables: str
) -> list[subprocess.Popen[str]]:
    """Start the workers that torchrun would start, forked from one that has imported PyTorch."""
    address, _, port = free_address().partition(":")
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": port} | variables
    return [
        one.start("-m", module, run, stem="torch", **common, RANK=str(n), LOCAL_RANK=str(n))
        for n in range(count)
    ]


def ended(workers: list[subprocess.Popen[str]]) -> tuple[str, str]:
    """What all workers have printed, and their errors; all have to end well."""
    ends = [worker.communicate(timeout=250) for worker in workers]
    out, said = ("".join(texts) for texts in zip(*ends, strict=True))
    assert [worker.returncode for worker in workers] == [0] * len(workers), said
    return out, said


def test_a_job_under_torchrun_goes_on_with_another_number_of_processes(
    one_host: Host, tmp_path: Path
) -> None:
    from torch.distributed import TCPStore

    for count, max_restarts, expected in ((2, 0, "resumed at 0"), (3, 1, "resumed at 1")):
        # The one of torchrun, which is no process of the job.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = start_workers(
            *(one_host, count, "tests.adapt.torch_job", tmp_path / "run"),
            MASTER_PORT=str(store.port),
            TORCHELASTIC_RUN_ID="one",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_MAX_RESTARTS=str(max_restarts),
        )
        out, said = ended(workers)
        assert out.count(expected) == count
        # Said once, before anything has failed.
        assert said.count("its restart may hang") == max_restarts
    found = holdfast.open_run(tmp_path / "run").restore()
    for name in ("rows", "columns", "copies"):
        assert np.array_equal(found[name], np.arange(30, dtype=np.float32).reshape(10, 3))


def test_the_rank_whose_replica_changes_is_named_and_all_ranks_go_back_together(
    one_host: Host, tmp_path: Path
) -> None:
    workers = start_workers(one_host, 3, "tests.adapt.torch_differing_job", tmp_path / "run")
    out, said = ended(workers)
    found = read_events(tmp_path / "run", ReplicasDiffer)
    assert {event.rank for event in found} == {1}
    first = min(found, key=lambda event: event.step)
    # Step 4 and step 8 are durable. The record of step 6 may leave RAM before it is read.
    assert first.step in (6, 7)
    assert "optimizer/state/0/exp_avg" in first.arrays
    assert f"replicas differ at step {first.step}: " in said
    ways = {tuple(way) for way in re.findall(r"goes back from (\d+) to (\d+)", out)}
    for way in ("raise", "rewind"):
        assert re.search(rf"{way} at the end of rank \d: .*replicas differ .*step 1\b", out), out
    assert out.count("goes back") == out.count("as without the difference") == 3
    ((at, start),) = ways
    # They learn of it at a vote, and the flip is after the checkpoint to which they go back.
    assert int(at) % 4 == 0
    assert int(start) == 5
    difference = last_difference(found)
    assert difference is not None
    assert difference.alone == 1
    status = [sys.executable, "-m", "holdfast", "status", str(tmp_path / "run")]
    shown = subprocess.run(status, env=one_host.environment, capture_output=True, text=True)
    assert f"replicas differ: {difference.text}" in " ".join(shown.stdout.split())


@pytest.mark.soak
def test_the_agent_outlives_the_worker_group_and_a_restart_reads_its_ram(
    one_host: Host, tmp_path: Path
) -> None:
    ends = []
    for how in ("killed", "ends"):
        ends.append(
            subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node=2", "-m", "tests.adapt.torch_restarted_job"),
                    *(str(tmp_path / "run"), how),
                ],
                env=one_host.environment,
                cwd=Path(__file__).parents[2],
                capture_output=True,
                text=True,
                timeout=100,
            )
        )
    assert [done.returncode != 0 for done in ends] == [True, False], ends[1].stderr
    check_went_on(ends[1].stdout, 2, {"ram"})


def check_went_on(said: str, count: int, sources: set[str]) -> None:
    """Check that `count` ranks have gone on from step 5, from those sources alone."""
    # torchrun may print the lines of two ranks as one.
    found = [json.loads(text) for text in re.findall(r"\{.*?\}\}", said)]
    assert [(each["start"], each["w"]) for each in found] == [(6, float(sum(range(9))))] * count
    assert {tier for each in found for tier in each["sources"]} <= sources


def torchrun(hosts: list[Host], *arguments: object) -> list[subprocess.Popen[str]]:
    """Start torchrun on each host, with one process."""
    address, _, port = free_address().partition(":")
    return [
        one.start(
            *("-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
            *(f"--node-rank={rank}", f"--master-addr={address}", f"--master-port={port}"),
            *("--nproc-per-node=1", "-m", "tests.adapt.torch_restarted_job"),
            *arguments,
        )
        for rank, one in enumerate(hosts)
    ]


@pytest.mark.soak
def test_jobs_of_torchrun_go_on_from_the_ram_of_the_hosts_that_are_left(tmp_path: Path) -> None:
    with some_hosts(3) as hosts:
        first = torchrun(hosts, tmp_path / "run", "killed", "elastic")
        for process in first:
            process.communicate(timeout=150)
        assert all(process.returncode for process in first)
        wait_until(lambda: has_copies(hosts, 5))
        lose(hosts[1])
        # Rank 0's host holds the store of the job, and any host may do that.
        again = torchrun([hosts[2], hosts[0]], tmp_path / "run", "ends", "elastic")
        ends = [process.communicate(timeout=150) for process in again]
        assert not any(process.returncode for process in again), ends
        check_went_on("".join(out for out, _ in ends), 2, {"ram", "peer"})
