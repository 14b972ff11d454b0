"""Real processes on storage that fails: a trainer that is watched, and disks that can be broken."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from holdfast.adapt.contract import EVERYTHING, OwnProcess
from holdfast.adapt.jax.state import JaxFramework
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.reading.restore import fill_targets
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import agent_folders
from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import find_agent
from holdfast.peers.config import PeerConfig
from holdfast.store.disk import DiskStore
from holdfast.store.location import RunLocation
from holdfast.trainer.opening.run_access import read_only
from holdfast.trainer.ranks.peer_token import share_token
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.hosts import WAIT_SECS, Host, events, wait_until
from tests.manifests import manifests
from tests.said import Said

RUN_ID = "0123456789abcdef0123456789abcdef"
TRAINER = Path(__file__).with_name("failing_trainer.py")
AGENT = Path(__file__).with_name("failing_agent.py")
SIZE = 50_000
_EXT4_SHUTDOWN = 0x8004587D


class Trainer(Said):
    """A `failing_trainer`."""

    def __init__(self, host: Host, run: Path, until: Path, **options: object) -> None:
        until.unlink(missing_ok=True)
        self.until = until
        chosen = {"size": SIZE, "pause": 0.01, "interval": 5, "until": str(until)} | options
        super().__init__(host.start(TRAINER, run, json.dumps(chosen), stem="jax"))

    @property
    def steps(self) -> list[dict]:
        return self.said("step")

    def now(self) -> int:
        """The step that it is at."""
        return self.steps[-1]["step"] if self.steps else -1

    def failures(self) -> list[tuple[int, int]]:
        """(the step whose save failed, the step at which that was raised)."""
        return [(line["failed"], line["at"]) for line in self.said("failed")]

    def go_on(self, count: int, secs: float = WAIT_SECS) -> None:
        """Waits until it has made so many steps more."""
        target = self.now() + count
        self.await_line("step", lambda line: line["step"] >= target, secs)

    def await_failure(self, after: int) -> tuple[int, int]:
        """Waits for a failure of a save later than `after`."""
        line = self.await_line("failed", lambda line: line["failed"] > after)
        return line["failed"], line["at"]

    def await_commit(self, run: Path, after: int) -> int:
        """Waits until a step later than `after` is durable."""
        wait_until(lambda: committed(run) > after)
        return committed(run)

    def end(self, secs: float = WAIT_SECS) -> int:
        """Ask it to end; return its exit code."""
        self.until.touch()
        try:
            return self.process.wait(secs)
        finally:
            self.kill()

    def slowest_save(self, first: int = 0) -> float:
        """The most seconds that one `save` took, from step `first` on."""
        return max(line["secs"] for line in self.steps if line["step"] >= first)


@contextlib.contextmanager
def trainer(host: Host, run: Path, until: Path, **options: object) -> Iterator[Trainer]:
    """A trainer that is gone on leaving."""
    made = Trainer(host, run, until, **options)
    try:
        yield made
    finally:
        made.kill()


def committed(run: Path) -> int:
    """Return the newest step whose manifest is in the run's folder."""
    return max((int(name.partition(".")[0]) for name in manifests(run)), default=-1)


@dataclass
class FailingAgent:
    """An agent over a file system that fails on demand."""

    control: Path

    def fail(self, path: str, operations: list[str], **fault: object) -> None:
        """From now on these operations fail on these paths, in the whole agent."""
        said = {"path": path, "operations": operations} | fault
        unfinished = self.control.with_suffix(".new")
        unfinished.write_text(json.dumps(said))
        unfinished.rename(self.control)

    def work(self) -> None:
        """Nothing fails any more."""
        self.control.unlink(missing_ok=True)


def start_failing_agent(
    host: Host, run: Path, control: Path, *, has_peers: bool = False
) -> FailingAgent:
    """Starts the agent before any trainer, so that the first one finds it; this process has to be
    on the host. With peers it is that of a host of several."""
    run.mkdir(parents=True, exist_ok=True)
    create_run(DiskStore(run, SystemClock()), str(run), RUN_ID, datetime.now(UTC))
    folder = agent_folders(RUN_ID, host.name)[0]
    folder.mkdir(mode=0o700)
    peers = None
    if has_peers:
        alone = Rendezvous(OwnProcess(), SystemClock())
        peers = PeerConfig(
            token_file=share_token(RunLocation(str(run)), RUN_ID, alone, SystemClock())
        )
    config = AgentConfig(
        run=str(run), run_id=RUN_ID, host=host.name, folder=str(folder), linger_secs=30, peers=peers
    )
    host.start(AGENT, control, msgspec.json.encode(config).decode())
    wait_until(lambda: find_agent(RUN_ID, host.name) is not None)
    # It stays as long as this process lives: a trainer may take longer to start than it waits.
    client = AgentClient(folder)
    client.call("expect", protocol.Empty(), protocol.AgentStatus)
    client.close()
    return FailingAgent(control)


# Disks.


@contextlib.contextmanager
def small_disk(folder: Path, size: str, options: str = "loop") -> Iterator[Path]:
    """An ext4 of its own in `folder`, or a skipped test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    folder.mkdir()
    image = folder.with_suffix(".img")
    commands = [
        ["truncate", "--size", size, str(image)],
        ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)],
        ["mount", "-o", options, str(image), str(folder)],
    ]
    for command in commands:
        _run_or_skip(command)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        image.unlink()


@contextlib.contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Freeze the file system: every write to the disk waits until the context ends."""
    _run_or_skip(["fsfreeze", "--freeze", str(disk)])
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


def shut_down(disk: Path) -> None:
    """The disk answers every operation with EIO from now on."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _EXT4_SHUTDOWN, struct.pack("I", 2))
    except OSError as error:
        pytest.skip(f"this kernel shuts no ext4 down: {error}")
    finally:
        os.close(fd)


def fill_up(folder: Path) -> Path:
    """A file that takes all the room that is left, also where it has taken some before."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096, 1024):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
                    os.fsync(file.fileno())
    return filler


def _run_or_skip(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode != 0:
        pytest.skip(f"{command[0]}: {done.stderr.strip()}")


def told(run: Path, *names: str) -> list[int]:
    """The steps of these events."""
    return [event["step"] for event in events(run, *names)]


def check_restorable(run: Path) -> int:
    """Check that the newest checkpoint reads back as its step's state; return its step.

    To read RAM, this process has to be on the host.
    """
    view = read_only(run).load_view()
    newest = view.newest_sound()
    assert newest is not None
    sources = view.sources(newest)
    restoration = JaxFramework().restoration(sources.spec, EVERYTHING)
    fill_targets(sources, restoration.targets)
    state = restoration.finish({})
    assert isinstance(state, dict)
    assert state["seen"] == newest.step
    assert (state["w"] == newest.step).all()
    assert (state["host"] == newest.step).all()
    return newest.step
