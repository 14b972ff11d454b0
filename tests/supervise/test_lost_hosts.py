"""A training on two hosts of which one is lost again and again, with its RAM, and named."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Host, events, wait_until
from tests.network import COORDINATOR_INTERFACE, network, why_not
from tests.trust.figures import tell

TRAINER = Path(__file__).with_name("collective_trainer.py")
REASON = why_not()
SEED = 20261126
LOSSES = int(os.environ.get("LOST_HOSTS", "10"))
STEPS_BETWEEN = 8
WAIT_SECS = 300.0


def steps_of(run: Path, rank: int) -> int:
    """How many steps a rank has made, with those that it has made again."""
    path = Path(f"{run}.steps-{rank}")
    return len(path.read_text().splitlines()) if path.exists() else 0


def await_steps(run: Path) -> None:
    """Waits until both ranks have made some more."""
    before = [steps_of(run, rank) for rank in range(2)]
    wait_until(
        lambda: all(steps_of(run, rank) >= before[rank] + STEPS_BETWEEN for rank in range(2)),
        WAIT_SECS,
    )


def lose(host: Host) -> None:
    """SIGKILL for all its processes, and its RAM is empty."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.prefix[3]], capture_output=True, text=True, check=True
    )
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    for entry in host.folder.iterdir():
        shutil.rmtree(entry)


@pytest.mark.soak
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_a_lost_host_is_named_and_the_training_goes_on(tmp_path: Path) -> None:
    rng, run = random.Random(SEED), tmp_path / "run"
    options = ["--max-restarts", "lost=inf", "--hang-timeout", "120"]
    with network(2) as net:

        def start(rank: int) -> subprocess.Popen[str]:
            host = net.hosts[rank]
            host.variables |= {
                "MASTER_ADDR": net.uncut_addresses[0],
                "MASTER_PORT": "29555",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": COORDINATOR_INTERFACE,
                "COLLECTIVE_STEPS": "1000000",
                "COLLECTIVE_STEP_SECS": "0.05",
                "TMPDIR": str(tmp_path),
            }
            words = ("run", *options, "--", sys.executable, str(TRAINER), str(run), "[]")
            return host.start("-m", "holdfast", *words)

        processes = [start(rank) for rank in range(2)]
        expected = []
        try:
            for _ in range(LOSSES):
                await_steps(run)
                victim = rng.randrange(2)
                lose(net.hosts[victim])
                processes[victim].communicate()
                expected.append((net.hosts[1 - victim].name, "lost", net.hosts[victim].name))
                # What follows is told before the host is back.
                wait_until(lambda: len(events(run, "command_ended")) == len(expected), WAIT_SECS)
                processes[victim] = start(victim)
            await_steps(run)
        finally:
            for host in net.hosts:
                lose(host)
            print(*(process.communicate()[1] for process in processes), sep="\n")
    ends = [(end["host"], end["cause"], end["lost_host"]) for end in events(run, "command_ended")]
    named = sum(end == right for end, right in zip(ends, expected, strict=True))
    tell(
        "lost hosts",
        f"{LOSSES} losses of one of two hosts with its RAM: each named, the training goes on",
        f"{named} of {len(expected)}",
    )
    assert named == len(expected), f"seed {SEED}: {ends}, expected {expected}"
