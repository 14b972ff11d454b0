"""The demo over three hosts as a user runs it, in small: whole, interrupted, and without room."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from holdfast.demo.learner import TrainerOptions
from tests.cli.command_line import INTERRUPTIBLE
from tests.hosts import Host, host, wait_until
from tests.ports import free_address
from tests.store.places import mounted
from tests.trainer.frameworks import FRAMEWORKS

STEPS = 24


@dataclass
class Demo:
    """A demo that runs, on a machine of its own."""

    made: Host
    folder: Path
    process: subprocess.Popen[str]

    def processes(self) -> list[int]:
        """The other processes that were told of its folder."""
        found = psutil.process_iter(["cmdline"])
        told = [p.pid for p in found if any(str(self.folder) in a for a in p.info["cmdline"] or [])]
        return [pid for pid in told if pid != self.process.pid]

    def end(self, secs: float) -> tuple[str, str]:
        """Its output, once it has ended and left nothing: no process, no memory."""
        out, err = self.process.communicate(timeout=secs)
        assert self.processes() == []
        assert list(self.made.folder.iterdir()) == []
        return out, err


@contextlib.contextmanager
def demo(folder: Path, *options: str, **environment: str) -> Iterator[Demo]:
    """A demo over three hosts; all that it has started is ended on leaving."""
    command = ["-c", INTERRUPTIBLE, "demo", "--hosts", "3", "--directory", str(folder)]
    with host() as made:
        # JAX's own choice of devices: one on each host.
        environment = {"XLA_FLAGS": "", **environment}
        process = made.start(
            *command, "--steps", str(STEPS), *options, stem="commands", **environment
        )
        running = Demo(made, folder, process)
        try:
            yield running
        finally:
            process.kill()
            process.wait()
            for pid in running.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@FRAMEWORKS
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts_are_lost_and_all_is_bit_identical_and_comes_from_the_others_memory(
    tmp_path: Path, framework: str
) -> None:
    with demo(
        tmp_path / "demo", "--framework", framework, "--json", "--interval-secs", "0.3"
    ) as running:
        out, err = running.end(280)
    assert running.process.returncode == 0, err[-3000:]
    verdict, link = err.rstrip().splitlines()[-2:]
    assert verdict.startswith("bit-identical: parameters yes")
    assert link.endswith("/report.html")
    result = json.loads(out)
    assert all(result["identity"].values())
    first, second = result["report"]["failures"]
    assert {first["cause"], second["cause"]} == {"host_lost"}
    assert first["host"] != second["host"]
    reads_disk = []
    lives = [life_of(running.folder, name) for name in ("host-0", "host-1", "host-2")]
    for number, failure in enumerate((first, second), start=1):
        assert {life[number]["restored_step"] for life in lives} == {
            failure["last_step"] - failure["steps_lost"]
        }
        assert failure["steps_lost"] >= 0
        assert {"ram", "peer"} & failure["sources"].keys()
        # What was sealed in the moment of the loss may be durable by then, and not copied yet.
        reads_disk.append("durable" in failure["sources"])
        # What the lost host has back it has from others, or from what its new agent has copied.
        index = int(failure["host"].removeprefix("host-"))
        assert "durable" not in lives[index][number]["sources"] or reads_disk[-1]
    assert not all(reads_disk)


def life_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a host's trainers continued from at each start."""
    lines = (folder / f"interrupted-{name}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == "started"]


def starts_agent(running: Demo) -> bool:
    """The folder of an agent is there; its process may not be."""
    return bool(list(running.made.folder.iterdir()))


def trains(running: Demo) -> bool:
    """A few steps are done."""
    path = running.folder / "interrupted-host-2.jsonl"
    return path.exists() and path.read_text().count('"type":"step"') > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(starts_agent, signal.SIGINT, id="starts, SIGINT"),
        pytest.param(starts_agent, signal.SIGTERM, id="starts, SIGTERM", marks=pytest.mark.soak),
        pytest.param(trains, signal.SIGINT, id="trains, SIGINT", marks=pytest.mark.soak),
        pytest.param(trains, signal.SIGTERM, id="trains, SIGTERM", marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_demo_leaves_no_process_and_no_memory(
    tmp_path: Path, moment: Callable[[Demo], bool], number: signal.Signals
) -> None:
    with demo(tmp_path / "demo") as running:
        wait_until(lambda: moment(running))
        running.process.send_signal(number)
        out, err = running.end(60)
    assert running.process.returncode == 130
    assert "interrupted; all processes have been ended" in out
    assert "Traceback" not in err


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_ends_the_demo_with_its_reason_and_leaves_nothing(tmp_path: Path) -> None:
    """There is room for one checkpoint; what comes after it stays in RAM, and is not durable."""
    with (
        mounted("tmpfs", tmp_path / "disk", "size=14m") as disk,
        demo(disk / "demo", "--interval-secs", "0.2") as running,
    ):
        out, err = running.end(280)
    assert running.process.returncode == 2, out
    # On a busy machine the first run may be over before it is told that there is no room.
    assert re.search("expected each trainer to finish, found (un)?interrupted, host-", out), out
    assert "no space left" in out, out
    assert "bytes left: free some, or choose another folder" in out, out
    assert "Traceback" not in err


def test_a_trainer_that_fails_ends_at_once_though_the_others_wait_for_it(tmp_path: Path) -> None:
    address = free_address()
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(host(f"host-{number}")) for number in range(2)]
        each = [
            TrainerOptions(
                run=f"{tmp_path}/run",
                journal=str(log),
                steps=1000,
                hosts=2,
                host=number,
                coordinator=address,
            )
            for number, log in enumerate((tmp_path / "0", "/dev/full"))
        ]
        trainers = [
            one.start(
                *("-m", "holdfast.demo.train", msgspec.json.encode(options).decode()),
                stem="jax",
                XLA_FLAGS="",
            )
            for one, options in zip(hosts, each, strict=True)
        ]
        lines = iter(trainers[1].stderr.readline, "")
        assert any("No space left on device" in line for line in lines)
        # JAX would wait for half a minute and more.
        assert trainers[1].wait(240) == 1
