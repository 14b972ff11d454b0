"""Two users of one machine: what each of them runs, and a place where both find Holdfast."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.hosts import Host

ROOT = Path(__file__).parents[2]
OWNER = 61001 + 2 * (os.getpid() % 1900)
STRANGER = OWNER + 1
USER_NAMES = {OWNER: "owner", STRANGER: "stranger"}
"""Users that no account needs to be of, and that other runs of the tests beside this one have not.

Each user of a machine has one default folder in its shared memory.
"""

RUN_SECS = 240.0
HOST = "host-a"

# Sends one request to the agent in a folder, and prints the status and the answer.
RAW_CALL = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(10)
connection.connect(sys.argv[1] + "/agent.sock")
body = sys.argv[3].encode()
head = f"POST /{sys.argv[2]} HTTP/1.1\\r\\nHost: agent\\r\\nContent-Length: {len(body)}\\r\\n"
connection.sendall(head.encode() + b"Connection: close\\r\\n\\r\\n" + body)
answer = b""
while more := connection.recv(65536):
    answer += more
print(answer.split()[1].decode(), answer.rpartition(b"\\r\\n\\r\\n")[2].decode())
"""

# Listens where an agent would, and prints the number of bytes that it receives.
FAKE_AGENT = """
import os, socket, sys
os.chdir(sys.argv[1])
if os.path.lexists("agent.sock"):
    os.unlink("agent.sock")
listener = socket.socket(socket.AF_UNIX)
listener.bind("agent.sock")
os.chmod("agent.sock", 0o777)
listener.listen()
print("listening", flush=True)
connection = listener.accept()[0]
connection.settimeout(10)
print(len(connection.recv(65536)), flush=True)
"""


@dataclass
class Users:
    """`place` holds a run each, and the agents' folders; `python` is one that both may start."""

    place: Path
    python: str
    environment: dict[str, str]

    @property
    def run(self) -> Path:
        return self.place / "run"

    @property
    def ram(self) -> Path:
        return self.place / "ram"

    def popen(self, uid: int, *arguments: object, **extra: str) -> subprocess.Popen[str]:
        """Starts Python as that user."""
        return subprocess.Popen(
            [self.python, *map(str, arguments)],
            user=uid,
            group=uid,
            extra_groups=[],
            cwd="/",
            env=self.environment | {"HOLDFAST_RAM": str(self.ram)} | extra,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def python_as(self, uid: int, *arguments: object, **extra: str) -> str:
        """What Python prints as that user; it has to end well."""
        with self.popen(uid, *arguments, **extra) as process:
            try:
                out, err = process.communicate(timeout=RUN_SECS)
            finally:
                process.kill()
        assert process.returncode == 0, f"{out}\n{err}"
        return out

    def trainer(self, *arguments: object, uid: int = OWNER, **extra: str) -> dict:
        """Return the output of a trainer of that user (`who_may_trainer`)."""
        script = self.place / "code" / "tests" / "trust" / "who_may_trainer.py"
        return json.loads(self.python_as(uid, script, *arguments, **extra))

    def asked(self, uid: int, folder: str, name: str, body: str = "{}") -> tuple[int, str]:
        """The HTTP status and the answer to one request to the agent in `folder`."""
        out = self.python_as(uid, "-c", RAW_CALL, folder, name, body)
        code, _, answer = out.strip().partition(" ")
        return int(code), answer

    @contextlib.contextmanager
    def fake_agent(self, folder: Path) -> Iterator[subprocess.Popen[str]]:
        """The stranger's process listens in `folder`."""
        with self.popen(STRANGER, "-c", FAKE_AGENT, folder) as process:
            try:
                assert process.stdout.readline() == "listening\n", process.communicate()
                yield process
            finally:
                process.kill()

    def make_folder(self, path: Path, uid: int, mode: int = 0o700) -> Path:
        """A folder of that user."""
        path.mkdir()
        os.chown(path, uid, uid)
        path.chmod(mode)
        return path

    def make_file(self, path: Path, uid: int) -> Path:
        """Make a file of that user that must not be written to."""
        path.write_text("precious\n")
        os.chown(path, uid, uid)
        path.chmod(0o600)
        return path

    def make_link(self, path: Path, target: Path, uid: int) -> None:
        """A symbolic link of that user."""
        path.symlink_to(target)
        os.lchown(path, uid, uid)


def open_to_all(folder: Path) -> None:
    """Takes the mode bits away as a hindrance, so that only the other checks are left."""
    for path in (folder.parent, folder, *folder.rglob("*")):
        # The agent lives, and may replace or remove a file meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISLNK(path.lstat().st_mode):
                path.chmod(0o777)


def why_not() -> str | None:
    """Why tests as two users cannot be run here, if they cannot."""
    if os.geteuid() != 0:
        return "becoming another user takes root"
    if _python() is None:
        return (
            f"no Python {sys.version_info.major}.{sys.version_info.minor} that other users may run"
        )
    return None


def _module_path(*first: Path) -> str:
    return os.pathsep.join([*map(str, first), str(Path(msgspec.__file__).parents[1])])


@functools.cache
def _python() -> str | None:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for found in (sys.executable, shutil.which(name, path="/usr/bin:/usr/local/bin")):
        if found is None:
            continue
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [found, "-c", "import aiohttp, ml_dtypes, msgspec, numpy, psutil, xxhash"],
                user=STRANGER,
                group=STRANGER,
                extra_groups=[],
                cwd="/",
                env={"PYTHONPATH": _module_path(), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                timeout=RUN_SECS,
                check=True,
            )
            return found
    return None


@contextlib.contextmanager
def users() -> Iterator[Users]:
    """A place for both, whose processes and folders are gone on leaving."""
    place = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    try:
        # Sticky, like the folder of agents' roots.
        place.chmod(0o1777)
        code = place / "code"
        shutil.copytree(ROOT / "src" / "holdfast", code / "holdfast")
        (code / "tests" / "trust").mkdir(parents=True)
        (code / "tests" / "engine").mkdir()
        for name in (
            *("trust/in_process.py", "trust/who_may_trainer.py"),
            *("engine/reusing.py", "engine/making.py", "attempts.py"),
        ):
            shutil.copy(ROOT / "tests" / name, code / "tests" / name)
        python = _python()
        assert python is not None
        environment = {
            "PYTHONPATH": _module_path(code),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOLDFAST_HOST": HOST,
            "TMPDIR": str(place),
        }
        made = Users(place, python, environment)
        made.make_folder(made.run, OWNER, 0o755)
        yield made
    finally:
        Host(HOST, place).end()
