"""A Docker daemon of a test's own, with an image that has Python and nothing else.

Its containers get Holdfast and its packages from this environment, read only. They use the network
of the machine, where only loopback is used. Root only; everything is gone on leaving.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import psutil

import holdfast
from tests.hosts import ROOT, wait_until

PROGRAMS = ("debootstrap", "docker", "dockerd", "runc")
IMAGE = "trainer:1"
DISTRIBUTION = "bookworm"
"""Its Python has the version of this environment, whose binary packages it loads."""
CACHE = ROOT / "build" / "engines"
SOURCE, PACKAGES, EXAMPLES = "/source", "/packages", "/examples"
USER = 1000


@functools.cache
def why_not() -> str | None:
    """Why there are no containers here; None where there are."""
    if os.geteuid() != 0:
        return "starting a Docker daemon takes root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if sys.version_info[:2] != (3, 11):
        return f"the image has Python 3.11, and the packages here are for {sys.version}"
    return None


def image_file() -> Path:
    """The image's files as an archive, made once: it takes a minute."""
    archive = CACHE / f"{DISTRIBUTION}.tar"
    if not archive.exists():
        folder = CACHE / f"{DISTRIBUTION}.{os.getpid()}"
        folder.mkdir(parents=True)
        try:
            subprocess.run(
                ["debootstrap", "--variant=minbase", "--include=python3", DISTRIBUTION, folder],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            half = CACHE / f"{folder.name}.tar"
            subprocess.run(["tar", "-C", folder, "-cf", half, "."], check=True)
            half.rename(archive)
        finally:
            shutil.rmtree(folder)
    return archive


@dataclass
class Container:
    """A container; `pid` is its first process, as the test sees it."""

    engine: Engine
    name: str

    @property
    def pid(self) -> int:
        return int(self.engine.docker("inspect", "-f", "{{.State.Pid}}", self.name))

    @property
    def is_running(self) -> bool:
        return self.engine.docker("inspect", "-f", "{{.State.Running}}", self.name) == "true\n"

    @property
    def code(self) -> int:
        """Its exit code, once it has ended."""
        return int(self.engine.docker("wait", self.name))

    @property
    def lines(self) -> list[list[str]]:
        """The words of each line that it has printed to stdout."""
        return [line.split() for line in self.engine.docker("logs", self.name).splitlines()]

    @property
    def errors(self) -> str:
        return self.engine.errors("logs", self.name)

    def starts(self) -> list[list[str]]:
        """The first step and the tiers of each start of the training."""
        return [line[1:] for line in self.lines if line[0] == "start"]

    def last_step(self) -> int:
        return max((int(line[1]) for line in self.lines if line[0] == "step"), default=-1)

    def await_starts(self, count: int, secs: float = 60.0) -> list[str]:
        """Waits for so many starts of the training, and a step of the last one; returns that."""
        wait_until(lambda: len(self.starts()) >= count or not self.is_running, secs)
        assert self.is_running, self.errors
        first = int(self.starts()[-1][0])
        wait_until(lambda: self.last_step() >= first + 2, secs)
        return self.starts()[-1]

    def trainer(self) -> psutil.Process:
        """The process that trains."""
        (process,) = (p for p in self.processes() if EXAMPLES in " ".join(p.cmdline()[1:2]))
        return process

    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def stop(self) -> float:
        """Stops it as `docker stop` does; returns how long that took."""
        began = time.monotonic()
        self.engine.docker("stop", "--time", "60", self.name)
        return time.monotonic() - began

    def kill(self) -> None:
        self.engine.docker("kill", self.name)
        assert self.code == 128 + signal.SIGKILL

    def start_again(self) -> None:
        self.engine.docker("start", self.name)


@dataclass
class Engine:
    """A daemon; `folder` is for the test's files and runs, and every user may write there."""

    socket: Path
    folder: Path

    def docker(self, *arguments: str) -> str:
        """What a command of `docker` prints; it has to end well."""
        done = self._call(arguments)
        assert done.returncode == 0, f"docker {arguments}: {done.stderr}"
        return done.stdout

    def errors(self, *arguments: str) -> str:
        return self._call(arguments).stderr

    def run(
        self,
        name: str,
        *command: str,
        variables: Mapping[str, str],
        options: Sequence[str] = (),
        user: int = USER,
    ) -> Container:
        """Starts a container with a command as its first process."""
        own = {"PYTHONPATH": f"{SOURCE}:{PACKAGES}", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
        settings = [f"--env={key}={value}" for key, value in (own | dict(variables)).items()]
        binds = {
            str(Path(holdfast.__file__).parents[1]): f"{SOURCE}:ro",
            str(Path(numpy.__file__).parents[1]): f"{PACKAGES}:ro",
            str(ROOT / "examples" / "containers"): f"{EXAMPLES}:ro",
            str(self.folder): str(self.folder),
        }
        volumes = [f"--volume={here}:{there}" for here, there in binds.items()]
        self.docker(
            "run", "--detach", "--network=host", f"--name={name}", f"--user={user}:{user}",
            *settings, *volumes, *options, IMAGE, *command,
        )  # fmt: skip
        return Container(self, name)

    def _call(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", f"--host=unix://{self.socket}", *arguments],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """A daemon whose files are in `folder`, with the image."""
    files = folder / "docker"
    files.mkdir(parents=True)
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    # Other users must reach it.
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o011)
    socket = files / "socket"
    with (files / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                "setpriv", "--pdeathsig=TERM", "dockerd",
                f"--data-root={files / 'data'}", f"--exec-root={files / 'exec'}",
                f"--pidfile={files / 'pid'}", f"--host=unix://{socket}",
                "--bridge=none", "--iptables=false",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    made = Engine(socket, shared)
    try:
        wait_until(lambda: not made.errors("version"), 60)
        made.docker("import", str(image_file()), IMAGE)
        yield made
    finally:
        names = made.docker("ps", "--all", "--quiet").split()
        if names:
            made.docker("rm", "--force", *names)
        daemon.terminate()
        daemon.wait(timeout=60)
        # The network namespace of the machine, which a daemon leaves mounted if it ran a container.
        namespace = files / "exec" / "netns" / "default"
        if namespace.exists():
            subprocess.run(["umount", namespace], check=True)
        shutil.rmtree(files)
