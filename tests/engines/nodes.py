"""Machines of a test's own: each has its own processes, network, name, RAM and cgroups.

A node is a set of namespaces whose first process reaps, as that of a machine does. When it is
killed, the kernel kills all others, and the memory file system goes with them: power is lost.
A node that boots again has the same name and address, an empty RAM, and an empty /srv.

Root only. Everything is gone on leaving, also after a failure; a killed test run takes the
processes along.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests import network
from tests.hosts import is_running, wait_until

CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("freezer", "memory", "cpuset", "devices", "cpuacct")
BOOT = """
set -eu
taskset --pid --cpu-list "$NODE_CPUS" $$ >/dev/null
hostname "$NODE_NAME"
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs disk /srv
mount --bind "$NODE_HOSTS" /etc/hosts
for controller in $NODE_CONTROLLERS; do
    mount --bind "/sys/fs/cgroup/$controller/$NODE_GROUP" "/sys/fs/cgroup/$controller"
done
echo ready
while :; do sleep 3600 & wait; done
"""
# A test run that is killed takes the nodes along.
ENTERED = ("setpriv", "--pdeathsig=KILL", "nsenter")
# Linux 6.18 numbers mount namespaces by CPU, and mounts none in one of a higher number.
ON_ONE_CPU = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))
UNSHARED = ("unshare", "-muipf", "--kill-child", "--mount-proc", "bash", "-c")
PROGRAMS = ("ip", "nsenter", "setpriv", "taskset", "unshare")


def why_not(*programs: str, has_cgroups: bool = False) -> str | None:
    """Why no nodes with these programs can be had here; None where they can."""
    reason = network.why_not()
    if reason is None:
        missing = [name for name in (*PROGRAMS, *programs) if shutil.which(name) is None]
        reason = f"not installed: {', '.join(missing)}" if missing else None
    if reason is None and has_cgroups:
        absent = [c for c in CONTROLLERS if not (CGROUPS / c / "cgroup.procs").exists()]
        reason = f"no cgroups of version 1 for {', '.join(absent)}" if absent else None
    return reason


@dataclass
class Node:
    """One machine. `logs` has a file for the output of each program that is started there."""

    name: str
    address: str
    space: str
    hosts: Path
    logs: Path
    controllers: Sequence[str]
    net: network.Network
    index: int
    _boot: subprocess.Popen[str] | None = None
    _programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def boot(self) -> None:
        """Switches it on; it is ready for programs afterwards."""
        for controller in self.controllers:
            group = CGROUPS / controller / self.space
            group.mkdir(exist_ok=True)
            if controller == "cpuset":
                for setting in ("cpuset.cpus", "cpuset.mems"):
                    (group / setting).write_text((group.parent / setting).read_text())
        variables = {
            "NODE_CPUS": ",".join(map(str, os.sched_getaffinity(0))),
            "NODE_NAME": self.name,
            "NODE_HOSTS": str(self.hosts),
            "NODE_GROUP": self.space,
            "NODE_CONTROLLERS": " ".join(self.controllers),
        }
        self._boot = subprocess.Popen(
            [*ENTERED, f"--net=/run/netns/{self.space}", *ON_ONE_CPU, *UNSHARED, BOOT],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._boot.stdout is not None
        line = self._boot.stdout.readline()
        assert line == "ready\n", f"{self.name} does not boot: {line!r}"

    @property
    def init(self) -> int:
        """The pid, as the test sees it, of the node's first process."""
        assert self._boot is not None
        (child,) = psutil.Process(self._boot.pid).children()
        return child.pid

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a program on the node; its output goes to a file of `logs`."""
        with (self.logs / f"{self.name}-{Path(command[0]).name}.log").open("ab") as log:
            program = subprocess.Popen(
                [*self._inside(), *command],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._programs.append(program)
        return program

    def run(
        self, *command: str, variables: Mapping[str, str] | None = None, secs: float = 60.0
    ) -> str:
        """What a program on the node prints; it has to end well."""
        done = subprocess.run(
            [*self._inside(), *command],
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=secs,
            check=False,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}: {done.stderr}"
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All processes of the node, as the test sees them."""
        space = _pid_space(self.init)
        return [p for p in psutil.process_iter() if _pid_space(p.pid) == space]

    def cut(self) -> None:
        """Cuts its cable: it reaches nobody any more, and keeps its power."""
        self.net.cut(self.index)

    def heal(self) -> None:
        """Its cable is back."""
        self.net.heal(self.index)

    def kill(self) -> None:
        """Takes its power: all its processes and what it had in RAM are gone."""
        if self._boot is not None:
            processes = [p.pid for p in self.processes()] if self._boot.poll() is None else []
            self._boot.kill()
            self._boot.communicate()
            for program in self._programs:
                program.wait()
            wait_until(lambda: not any(is_running(pid) for pid in processes))
            self._boot, self._programs = None, []
        for controller in self.controllers:
            _remove_cgroup(CGROUPS / controller / self.space)

    def _inside(self) -> list[str]:
        return ["nsenter", f"--target={self.init}", "--mount", "--uts", "--ipc", "--net", "--pid"]


@contextlib.contextmanager
def nodes(names: Sequence[str], work: Path, *, has_cgroups: bool = False) -> Iterator[list[Node]]:
    """Nodes that know one another by name. Their files are in `work`."""
    hosts, logs = work / "hosts", work / "logs"
    logs.mkdir()
    with network.network(len(names)) as net, contextlib.ExitStack() as stack:
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(net.addresses, names, strict=True))]
        hosts.write_text("\n".join(lines) + "\n")
        machines = [
            Node(name, net.addresses[i], net.hosts[i].prefix[3], hosts, logs,
                 CONTROLLERS if has_cgroups else (), net, i)
            for i, name in enumerate(names)
        ]  # fmt: skip
        for machine in machines:
            stack.callback(machine.kill)
            machine.boot()
        yield machines


def _pid_space(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _remove_cgroup(group: Path) -> None:
    for folder in (*sorted(group.rglob("*/"), reverse=True), group):
        wait_until(lambda folder=folder: _removed(folder))


def _removed(folder: Path) -> bool:
    # A process that has ended is still a member for a moment.
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()
