"""A training on two hosts, each under its own `holdfast run`, of which one rank hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.hosts import events
from tests.network import COORDINATOR_INTERFACE, network, why_not

TRAINER = Path(__file__).with_name("collective_trainer.py")
REASON = why_not()


@pytest.mark.soak
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_each_host_ends_its_own_ranks_and_the_job_comes_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with network(2) as net:
        processes = []
        for rank, host in enumerate(net.hosts):
            host.variables |= {
                "MASTER_ADDR": net.uncut_addresses[0],
                "MASTER_PORT": "29555",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": COORDINATOR_INTERFACE,
            }
            options = ["--max-restarts", "lost=3,hang=3", "--hang-timeout", "12"]
            faults = '[[0, 1, 5, "wait"]]'
            words = ("run", *options, "--", sys.executable, str(TRAINER), str(run), faults)
            processes.append(host.start("-m", "holdfast", *words))
        outputs = [process.communicate(timeout=500) for process in processes]
    shown = "\n".join(err for _, err in outputs)
    assert [process.returncode for process in processes] == [0, 0], shown
    assert all("w 24.0" in out for out, _ in outputs)
    ends = events(run, "command_ended")
    assert {end["host"] for end in ends} == {"host-a", "host-b"}
    assert {end["cause"] for end in ends} <= {"hang", "lost"}
    # Host A's rank waits in the collective, so that the other one is behind.
    for end in ends:
        if (end["host"], end["cause"]) == ("host-a", "hang"):
            assert "behind: rank 1 (step 4)" in end["reason"]
