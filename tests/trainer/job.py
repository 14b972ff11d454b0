"""A job over several hosts: one process on each, with an agent and RAM of its own."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts import WAIT_SECS, Host, events, host, is_running, stop, wait_until
from tests.manifests import manifest_path
from tests.ports import free_address
from tests.said import Said
from tests.trainer.test_processes import PROCESS

END_SECS = 240.0


@dataclass
class Job:
    """One start of a run; rank r is on `hosts[r]`."""

    hosts: list[Host]
    run: Path
    ranks: list[Said]

    def results(self, secs: float = END_SECS) -> list[dict[str, Any]]:
        """What each rank said, as one dict each; all have to end well."""
        deadline = time.monotonic() + secs
        try:
            for rank in self.ranks:
                rank.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired as error:
            # The one that holds up the others need not be the first.
            for rank in self.ranks:
                rank.abort()
            raise AssertionError(f"not ended in {secs} s:\n{self.told()}") from error
        for rank in self.ranks:
            rank.finish()
        return [rank.together() for rank in self.ranks]

    def told(self) -> str:
        """What a failing test shows of it."""
        told = [f"rank {rank}: {said.told()}" for rank, said in enumerate(self.ranks)]
        return "\n".join([*told, *(str(event) for event in events(self.run)[-60:])])

    def await_lines(self, name: str, **bounds: Any) -> list[dict[str, Any]]:
        """Each rank's first line with that member."""
        return [rank.await_line(name, **bounds) for rank in self.ranks]

    def wait_until(self, is_true: Callable[[], bool], secs: float = WAIT_SECS) -> None:
        """Waits for a condition; where it does not come true, all is told that was said."""
        try:
            wait_until(is_true, secs)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from error

    def has_ended(self) -> bool:
        """Whether any rank has ended."""
        return any(rank.process.poll() is not None for rank in self.ranks)

    def kill(self) -> None:
        """SIGKILLs the ranks that still run."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.kill()


def start_job(
    hosts: list[Host],
    run: Path,
    *,
    device_count: int = 2,
    script: Path = PROCESS,
    address: str = "",
    **todo: Any,
) -> Job:
    """Starts one process on each host."""
    flags = f"--xla_force_host_platform_device_count={device_count}"
    address, stem = address or free_address(), todo.get("framework", "jax")
    argument = json.dumps(todo)
    ranks = [
        Said(h.start(script, address, len(hosts), n, run, argument, stem=stem, XLA_FLAGS=flags))
        for n, h in enumerate(hosts)
    ]
    return Job(hosts, run, ranks)


def run_job(hosts: list[Host], run: Path, **todo: Any) -> list[dict[str, Any]]:
    """What each rank of a job said that ends well."""
    return start_job(hosts, run, **todo).results()


def check_went_on(found: list[dict[str, Any]], step: int) -> None:
    """All ranks have gone on from `step`, and each array was right, bit for bit."""
    assert [(r["start"], r["right"]) for r in found] == [(step + 1, True)] * len(found)


def sources(run: Path) -> dict[str, int]:
    """The bytes that the ranks of the last start have read, by tier."""
    started = max(e["time"] for e in events(run, "attempt_started"))
    read: dict[str, int] = {}
    for event in events(run, "restored"):
        if event["time"] > started:
            for tier, size_bytes in event["sources"].items():
                read[tier] = read.get(tier, 0) + size_bytes
    return read


def lose(*lost: Host) -> None:
    """These hosts are gone with their RAM: their processes first, then what they held."""
    trainers = [trainer for one in lost for trainer in one.trainers if trainer.poll() is None]
    # A trainer that outlives its agent by a moment would start another one.
    for trainer in trainers:
        stop(trainer.pid)
    agents = [process.pid for one in lost for process in one.agent_processes()]
    # One after the other within a moment, as a power supply goes.
    for pid in (*agents, *(trainer.pid for trainer in trainers)):
        os.kill(pid, signal.SIGKILL)
    for trainer in trainers:
        trainer.wait()
    for pid in agents:
        wait_until(lambda pid=pid: not is_running(pid))
    for one in lost:
        # What had begun to start one.
        one.kill_agents()
        for folder in one.folder.iterdir():
            shutil.rmtree(folder)


def seen(run: Path, name: str) -> set[int]:
    """The steps of the events of that name."""
    return {event["step"] for event in events(run, name)}


def parts_in_ram(one: Host, step: int, attempt: int = 1) -> set[int]:
    """The ranks whose part of that checkpoint is sealed in the host's RAM."""
    return _ranks(f"{one.folder}/*/ram/checkpoints/{step:09d}.{attempt}-*/part-*.json")


def has_copies(hosts: Iterable[Host], step: int, count: int = 2) -> bool:
    """Whether each rank's part stands in the RAM of so many hosts.

    That is more than "protected" says, for which it is enough that a part is durable.
    """
    hosts = list(hosts)
    held = [rank for one in hosts for rank in parts_in_ram(one, step)]
    return all(held.count(rank) >= count for rank in range(len(hosts)))


def durable_parts(run: Path, step: int, attempt: int = 1) -> set[int]:
    """The ranks whose part of that checkpoint is durable."""
    return _ranks(f"{run}/checkpoints/{step:09d}.{attempt}-*/part-*.json")


def is_committed(run: Path, step: int, attempt: int = 1) -> bool:
    """Whether the checkpoint has its manifest."""
    return manifest_path(run, step, attempt).exists()


def slots_locked(one: Host, pid: int, kind: str) -> bool:
    """Whether the process fills a slot of the host (`WRITE`), or reads one (`READ`)."""
    slots = set()
    for path in glob.glob(f"{one.folder}/*/ram/slots/*"):
        with contextlib.suppress(FileNotFoundError):
            slots.add(os.stat(path).st_ino)
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(
        lock[3] == kind and int(lock[4]) == pid and int(lock[5].rpartition(":")[2]) in slots
        for lock in locks
        if lock[1] == "FLOCK"
    )


def _ranks(parts: str) -> set[int]:
    # Unlike Path.glob this takes a folder that is removed meanwhile for one that is not there.
    return {int(path.rpartition("/")[2].split("-")[1]) for path in glob.glob(parts)}


def comes_true(is_true: Callable[[], bool], secs: float) -> bool:
    """Whether it does within that time; it is looked at often, because moments may be short."""
    deadline = time.monotonic() + secs
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def spin_until(is_true: Callable[[], bool], secs: float = 60.0) -> None:
    """As `wait_until`, for moments that are short."""
    assert comes_true(is_true, secs), f"{is_true} did not come true in {secs} s"


@contextlib.contextmanager
def some_hosts(count: int) -> Iterator[list[Host]]:
    """Hosts `host-a`, `host-b` and so on."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(host(f"host-{name}")) for name in "abcdefgh"[:count]]


def stopped_inside(
    pid: int,
    steps: Iterable[int],
    has_begun: Callable[[int], bool],
    is_inside: Callable[[int], bool],
) -> int:
    """Stops the process in the middle of what it does for one of the steps; which one that is."""
    left = list(steps)
    while left:
        step = _first_begun(left, has_begun)
        stop(pid)
        if is_inside(step):
            return step
        os.kill(pid, signal.SIGCONT)
        left = [later for later in left if later > step]
    raise AssertionError("it was never caught in the middle")


def _first_begun(steps: list[int], has_begun: Callable[[int], bool]) -> int:
    """Some step of which it has begun, once there is one: a first one may have come and gone."""
    found: list[int] = []

    def is_any() -> bool:
        found.extend(step for step in steps if has_begun(step))
        return bool(found)

    spin_until(is_any)
    return max(found)


def stopped_before_the_manifest(hosts: list[Host], run: Path) -> int:
    """Stops the leading agent when all parts of a step are durable and its manifest is not."""

    def are_all_durable(step: int) -> bool:
        if is_committed(run, step):
            return False
        all_ranks = set(range(len(hosts)))
        # Silent for longer, the leader would be followed by another.
        is_in_time = comes_true(lambda: durable_parts(run, step) == all_ranks, 4.0)
        return is_in_time and not is_committed(run, step)

    return stopped_inside(
        hosts[0].agent().pid,
        range(8, 200, 4),
        lambda step: 0 in durable_parts(run, step) and not is_committed(run, step),
        are_all_durable,
    )
