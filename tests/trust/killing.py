"""Kill trainers and agents: what they printed until then, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.protocol import AgentStatus, Empty
from holdfast.local_agent.client import AgentGoneError
from holdfast.local_agent.place import LOCK, SOCKET
from holdfast.trainer.opening.run_access import read_only
from tests.hosts import WAIT_SECS, Host, events, finished, is_running, wait_until
from tests.manifests import folders, manifests
from tests.said import Said

TRAINER = Path(__file__).with_name("killed_trainer.py")


class Trainer(Said):
    """A `killed_trainer`."""

    def __init__(self, host: Host, run: Path, **options: object) -> None:
        super().__init__(host.start(TRAINER, run, json.dumps(options), stem="jax"))

    @property
    def acknowledged(self) -> int:
        """The newest step that was reported as durable."""
        return max((line["acknowledged"] for line in self.said("acknowledged")), default=-1)


@contextlib.contextmanager
def trainer(host: Host, run: Path, **options: object) -> Iterator[Trainer]:
    """A trainer that is gone on leaving."""
    made = Trainer(host, run, **options)
    try:
        yield made
    finally:
        made.kill()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process within the context, and continue it afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def sealed(run: Path) -> int:
    """Return the newest step that the events report as whole in RAM or in the durable tier."""
    return max((event["step"] for event in events(run, "sealed", "committed")), default=-1)


def latest_step(run: Path) -> int:
    """The newest step that can be restored now; this process has to be on the host."""
    newest = read_only(run).load_view().newest_sound()
    return newest.step if newest is not None else -1


def agent_folder(host: Host) -> Path:
    """The folder of the one agent of the host, whether it lives or not."""
    (folder,) = [path for path in host.folder.iterdir() if not path.name.startswith(".")]
    return folder


def lock_holder(folder: Path) -> int | None:
    """Return the process that holds the agent's lock, as the kernel reports it."""
    with contextlib.suppress(FileNotFoundError):
        inode = (folder / LOCK).stat().st_ino
        return next((pid for pid, locked in _locks() if locked == inode), None)
    return None


def locks_of(pid: int, folder: Path) -> bool:
    """Whether the process has a lock on a file in `folder`."""
    inodes = {locked for holder, locked in _locks() if holder == pid}
    return any(path.stat().st_ino in inodes for path in folder.iterdir())


def _locks() -> Iterator[tuple[int, int]]:
    """(process, inode) of each lock that is held on this machine."""
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields:
            yield int(fields[4]), int(fields[5].rpartition(":")[2])


def answering(folder: Path) -> int | None:
    """The process of the agent that answers there."""
    if not (folder / SOCKET).exists():
        return None
    client = AgentClient(folder, timeout_secs=10.0)
    try:
        return client.call("status", Empty(), AgentStatus).pid
    except AgentGoneError:
        return None
    finally:
        client.close()


def kill_agent_once_it_has_its_place(folder: Path, after_secs: float) -> tuple[int, bool]:
    """SIGKILLs the next agent, so long after it took the lock.

    Returns its process, and whether it was killed before it had adopted what is in RAM: it makes
    its socket only then.
    """
    before = _socket(folder)
    deadline = time.monotonic() + WAIT_SECS
    while (pid := lock_holder(folder)) is None or not is_running(pid):
        assert time.monotonic() < deadline, f"no agent came within {WAIT_SECS} s"
        time.sleep(0.001)
    time.sleep(after_secs)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    return pid, _socket(folder) == before


def _socket(folder: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        state = (folder / SOCKET).stat()
        return state.st_ino, state.st_ctime_ns
    return None


def end_well(host: Host, run: Path, **options: object) -> None:
    """Check that the run continues from disk alone, and leaves no process, memory or partial file.

    The agent is stopped before, so that what was in RAM alone becomes durable; the next agent has
    no trainers and clears incomplete data.
    """
    floor = sealed(run)
    _holdfast(host, "stop", run)
    with trainer(host, run, steps=3, **options) as last:
        line = last.await_line("start")
        assert line["start"] > floor, f"step {floor} was sealed: {line}"
        assert line["right"]
        last.finish()
    _holdfast(host, "stop", run)
    wait_until(lambda: host.agent_processes() == [])
    assert list(host.folder.iterdir()) == []
    unfinished = [path for path in run.rglob("*") if path.name.startswith(".")]
    assert unfinished == []
    assert folders(run) == manifests(run).keys()
    _holdfast(host, "verify", run)


def _holdfast(host: Host, *arguments: object) -> None:
    """One command, which has to end well."""
    finished(host.start("-m", "holdfast", *arguments, stem="commands"))


def end_of_agent(host: Host) -> None:
    """Stops the agent; nothing is left of it on the host."""
    _holdfast(host, "stop", "--all")
    wait_until(lambda: host.agent_processes() == [])
    assert list(host.folder.iterdir()) == []
