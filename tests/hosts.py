"""A host of a test's own: its RAM folder, its name, and an end to every process it started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from holdfast.host.wire import protocol
from holdfast.host.wire.client import AgentClient
from holdfast.local_agent.client import AgentGoneError
from holdfast.local_agent.place import LOCK, SOCKET
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import Event
from tests import prepared

ROOT = Path(__file__).parents[1]
WAIT_SECS = 240.0
AGENTS = {"holdfast.host", "holdfast.interop.mindio.file_agent"}
"""The modules of the processes that trainers start on their host."""
AnyProcess = TypeVar("AnyProcess", bound=subprocess.Popen)


@dataclass
class Host:
    """One host: `folder` is the root of its RAM tier; `prefix` goes before each command there."""

    name: str
    folder: Path
    trainers: list[subprocess.Popen[str]] = field(default_factory=list)
    prefix: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        own = {"HOLDFAST_RAM": str(self.folder), "HOLDFAST_HOST": self.name}
        own |= {"PYTHONFAULTHANDLER": "1"}
        variables = os.environ | own | self.variables
        # Scripts of the tests import others.
        paths = (variables.get("PYTHONPATH", ""), str(ROOT))
        return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def start(
        self, script: Path | str, *arguments: object, stem: str = "", **extra: str
    ) -> subprocess.Popen[str]:
        """Starts a Python script on this host, where `stem` names a kind of `prepared.MODULES`
        forked from a process that has imported these.
        """
        command = [str(script), *map(str, arguments)]
        environment = self.environment | extra
        if stem and not self.prefix:
            self.trainers.append(prepared.start(stem, command, environment))
            return self.trainers[-1]
        process = subprocess.Popen(
            [*self.prefix, sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.trainers.append(process)
        return process

    def agents(self) -> list[protocol.AgentStatus]:
        """The agents that answer on this host."""
        found = []
        for folder in self._agent_folders():
            client = AgentClient(folder, timeout_secs=10.0)
            with contextlib.suppress(AgentGoneError):
                found.append(client.call("status", protocol.Empty(), protocol.AgentStatus))
            client.close()
        return found

    def agent(self) -> protocol.AgentStatus:
        """The one agent there is, once it answers: without a processor it may not in time."""
        answers: list[protocol.AgentStatus] = []
        wait_until(lambda: answers.extend(self.agents()) or answers)
        (status,) = answers
        return status

    def kill_agent(self) -> int:
        """SIGKILLs the one agent, waits until it is gone, and returns its pid."""
        pid = self.agent().pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        return pid

    def kill_agents(self) -> None:
        """SIGKILLs the agents that are there, also one that is starting or about to leave."""
        for agent in self.agent_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.kill()
            wait_until(lambda pid=agent.pid: not is_running(pid))

    def kill_with_agent(self, trainer: subprocess.Popen[str]) -> None:
        """SIGKILLs a trainer and its agent; neither has time to do anything about the other."""
        stop(trainer.pid)
        self.kill_agent()
        trainer.kill()
        trainer.wait()

    def end(self) -> None:
        """Ends every process and removes the folder."""
        for trainer in self.trainers:
            if trainer.poll() is None:
                _kill_with_children(trainer.pid)
            trainer.communicate()
        self.kill_agents()
        shutil.rmtree(self.folder, ignore_errors=True)

    def agent_processes(self) -> list[psutil.Process]:
        """All agents of this host, also one that is just starting and does not answer yet."""
        found = psutil.process_iter(["cmdline"])
        return [
            p
            for p in found
            if str(self.folder) in " ".join(p.info["cmdline"] or []).rstrip()[-2000:]
            and not AGENTS.isdisjoint(p.info["cmdline"] or [])
        ]

    def _agent_folders(self) -> list[Path]:
        return [p for p in self.folder.glob("*") if (p / SOCKET).exists() and (p / LOCK).exists()]


def _kill_with_children(pid: int) -> None:
    """SIGKILL a process and all that it started, which would keep its pipes open."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@contextlib.contextmanager
def host(name: str = "host-a") -> Iterator[Host]:
    """A host of the caller's own, ended on leaving."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    made = Host(name, folder)
    prepared.fork_agents()
    try:
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def ending(process: AnyProcess) -> Iterator[AnyProcess]:
    """Yield a process that no `Host` ends; on leaving, kill it and close its pipes."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def expire_leases(*places: Path) -> None:
    """Let the leases in these runs expire: a host that lost its RAM took that long to come back."""
    for place in places:
        for lease in place.glob("leases/*.json"):
            os.utime(lease, (0, 0))


def is_running(pid: int) -> bool:
    """Whether a process runs; what is left of a dead one does not count.

    Of a killed one the first thread may be dead while another still has its files, and locks.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def delete_run(run: Path) -> None:
    """Deletes a run's directory, also one in which an agent adds and removes files meanwhile."""
    wait_until(lambda: shutil.rmtree(run, ignore_errors=True) or not run.exists())


def copy_run(run: Path, copy: Path) -> None:
    """Copies a run's directory, also one in which an agent adds and removes files meanwhile."""

    def copy_file(source: str, target: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source, target)

    shutil.copytree(run, copy, copy_function=copy_file)


def stop(pid: int) -> None:
    """SIGSTOPs a process, and waits until each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: set(_thread_states(pid)) <= set("TtZX"))


def _thread_states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def wait_until(is_true, secs: float = WAIT_SECS) -> None:
    """Waits for a condition; fails where it does not come true in time."""
    deadline, pause_secs = time.monotonic() + secs, 0.005
    while not is_true():
        assert time.monotonic() < deadline, f"{is_true} did not come true in {secs} s"
        time.sleep(pause_secs)
        # Many conditions read files or ask an agent, which takes the processor from what they
        # wait for.
        pause_secs = min(1.5 * pause_secs, 0.05)


def events(run: Path, *names: str) -> list[dict]:
    """The run's events of these names, in the order of their time; a line cut short is no event."""
    found: list[Event] = read_events(run, Event)
    decoded = [json.loads(msgspec.json.encode(event)) for event in found]
    return [event for event in decoded if not names or event["event"] in names]


def await_events(run: Path, *names: str, count: int) -> list[dict]:
    """The run's events of these names, once there are so many: a thread of the agent writes them,
    so that they may be in the files after what they are about is seen."""
    wait_until(lambda: len(events(run, *names)) >= count)
    return events(run, *names)


def finished(process: subprocess.Popen[str], secs: float = WAIT_SECS) -> str:
    """A process's output; it has to end well."""
    out, err = process.communicate(timeout=secs)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out
