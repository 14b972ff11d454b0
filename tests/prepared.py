"""Start processes that have imported what they run: each is forked from one that has.

To import Holdfast and a framework takes a process 0.9 s of a processor with JAX and 2 s with
PyTorch, often more than what its test is about. `start` forks it from a *stem*, a process in which
this module runs as a program, in some hundredths of a second. A stem only imports: backends,
threads and managers start in the forked process, which ends as any Python program does.

There are two stems of each kind, used in turn: the processes of a job hash strings differently, as
those of a real job do. A stem ends when the process that started it has ended.

Holdfast starts its agents by itself. After `fork_agents` their interpreters have them forked from a
stem, which costs a tenth of a start; `startup/sitecustomize.py` says when they do not. Such agents
have the times that `TIMES` names, so that a test need not wait for each try of what fails.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.startup.sitecustomize import STEMS, address

ROOT = Path(__file__).parents[1]
MESSAGE_BYTES_MAX = 1 << 18
WORD = struct.Struct("i")
Order = tuple[list[str], dict[str, str], str]
"""Arguments, environment, working directory."""
ARRAYS = ("numpy", "ml_dtypes")
HOLDFAST = (*ARRAYS, "psutil", "holdfast", "holdfast.trainer.checkpoint_manager")
MODULES = {
    "numpy": (*HOLDFAST, "holdfast.adapt.numpy_state"),
    "jax": (
        *(*HOLDFAST, "jax", "jax.numpy", "holdfast.adapt.jax.state"),
        *("jax.experimental.multihost_utils", "jaxlib.mlir.dialects.mhlo"),
    ),
    "torch": (
        *(*HOLDFAST, "torch", "torch.distributed.tensor", "holdfast.adapt.torch.state"),
        # The second with the first step of an optimizer.
        *("torch.distributed.fsdp", "torch._dynamo"),
    ),
    "commands": ("holdfast.cli.main", "rich.status"),
    "agents": (
        *("holdfast.local_agent.detached_process", "holdfast.host.process"),
        *(*ARRAYS, "aiohttp", "holdfast.peers.server", "holdfast.peers.sender"),
    ),
}
"""What a stem of each kind imports: also what its processes import later, at each commit or peer.
Whether an agent loads that only when it is needed is a claim about one that is started, not forked.
"""
OF_SOME_VERSIONS = {"jaxlib.mlir.dialects.mhlo"}
TITLE_BYTES_MAX = 1 << 14
"""The size of the command line of an agent."""
TIMES = "TIMES_OF_THE_TESTS"
"""A variable with seconds, by the names of classes and their attributes, as JSON."""
READ_AT_THE_START = ("PYTHON", "JAX_", "OMP_")
"""Variables that begin so have had their effect when a process is forked."""


class Forked(subprocess.Popen[str]):
    """A process of a stem, with what tests use of `subprocess.Popen`."""

    def __init__(
        self, stem: Stem, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode = None
        self.stdin = None
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self._said, said_end = os.pipe()
        try:
            stem.ask(arguments, environment, (out_end, err_end, said_end))
        finally:
            for end in (out_end, err_end, said_end):
                os.close(end)
        self.stdout: IO[str] = open(out)  # noqa: SIM115
        self.stderr: IO[str] = open(err)  # noqa: SIM115
        self.pid = self._read_number()
        self._readers: list[threading.Thread] = []
        self._texts = ["", ""]
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._said)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                ended, _, _ = select.select([self._said], [], [], timeout)
                if not ended:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = self._read_number()
            return self.returncode

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str, str]:
        assert input is None
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read, args=(index,), daemon=True)
                for index in range(len(self._texts))
            ]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return self._texts[0], self._texts[1]

    def _read(self, index: int) -> None:
        stream = (self.stdout, self.stderr)[index]
        if not stream.closed:
            with stream:
                self._texts[index] = stream.read()

    def _read_number(self) -> int:
        word = os.read(self._said, WORD.size)
        assert word, f"the stem of {self.args} has ended"
        return WORD.unpack(word)[0]


class Stem:
    """A process that has imported the modules of one kind, from which others are forked.

    It takes orders from the process that started it, and by `door` from others.
    """

    def __init__(self, kind: str, door: socket.socket | None = None) -> None:
        paths = filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT)))
        self._own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
        self._known = dict(os.environ)
        self._line, line_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door_fd = -1 if door is None else door.fileno()
        with line_end:
            self._process = subprocess.Popen(
                # The blanks are room for the command line of a fork.
                [sys.executable, __file__, kind, str(door_fd), " " * TITLE_BYTES_MAX],
                env=self._known | self._own,
                stdin=line_end.fileno(),
                pass_fds=() if door is None else (door_fd,),
                # Pipes, as its processes have: Python makes other streams for a file.
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._line.close()
        self._process.communicate()

    def ask(
        self, arguments: Sequence[str], environment: Mapping[str, str], ends: Sequence[int]
    ) -> None:
        """Has it fork a process that runs `python ARGUMENTS`, with these ends of pipes.

        They are for its output, its errors, and what the stem says of it: pid, then exit code.
        """
        for name in self._known.keys() | environment.keys():
            if name.startswith(READ_AT_THE_START):
                assert environment.get(name) in (self._own.get(name), self._known.get(name)), name
        variables = dict(environment) | self._own
        order = list(arguments), variables, os.getcwd()
        socket.send_fds(self._line, [repr(order).encode()], ends)


_starting = threading.RLock()
"""Tests with several threads start each kind of stem once."""


@functools.cache
def _stems(kind: str) -> Iterator[Stem]:
    return itertools.cycle([Stem(kind), Stem(kind)])


def start(kind: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
    """Starts a process that runs `python ARGUMENTS`, with what stems of this kind have imported."""
    with _starting:
        stem = next(_stems(kind))
    return Forked(stem, arguments, environment)


@functools.cache
def _agent_stems() -> str:
    """Start the stems of agents, once; return the name that their addresses begin with."""
    name = f"stem-{os.getpid()}"
    for number in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
            door.bind(address(name, number))
            Stem("agents", door)
    return name


def fork_agents() -> None:
    """Have the agents that this process and its children start from now on forked."""
    with _starting:
        os.environ[STEMS] = _agent_stems()


def _forked_order(lines: Collection[socket.socket]) -> Order:
    """Fork a process for each order; return in that process alone, with its order."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: pid, and where its end is said
    ready = selectors.DefaultSelector()
    for line in lines:
        ready.register(line, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj not in lines:
                ready.unregister(key.fd)
                pid, said = running.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                _say(said, os.waitstatus_to_exitcode(status))
                os.close(said)
                os.close(key.fd)
                continue
            message, ends, _, _ = socket.recv_fds(key.fileobj, MESSAGE_BYTES_MAX, 3)
            if not message:
                os._exit(0)
            out, err, said = ends
            pid = os.fork()
            if pid:
                _say(said, pid)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, said
                ready.register(pidfd, selectors.EVENT_READ)
                os.close(out)
                os.close(err)
                continue
            ready.close()
            for line in lines:
                line.close()
            for pidfd, (_, other) in running.items():
                os.close(pidfd)
                os.close(other)
            os.close(said)
            for number, end in ((1, out), (2, err)):
                os.dup2(end, number)
                os.close(end)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return ast.literal_eval(message.decode())


def _say(said: int, number: int) -> None:
    # The process that waits may have been killed.
    with contextlib.suppress(BrokenPipeError):
        os.write(said, WORD.pack(number))


def _set_command_line(words: Sequence[str]) -> None:
    """Have /proc show this process with the command line of the one for which it was forked."""
    title = b"\0".join(map(os.fsencode, words))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    assert len(title) < end - start, f"{len(title)} bytes"
    # Blanks at the end of the last argument, which is JSON.
    ctypes.memset(start, ord(" "), end - start - 1)
    ctypes.memmove(start, title, len(title))


def _run(arguments: Sequence[str]) -> None:
    """Run what `python ARGUMENTS` runs."""
    if arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    if arguments[0] == "-c":
        name, code = "<string>", arguments[1]
        sys.argv = ["-c", *arguments[2:]]
    else:
        module.__file__ = name = arguments[0]
        code = Path(name).read_text()
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(name).parent))
    exec(compile(code, name, "exec"), module.__dict__)


def _set_times(times: Mapping[str, float]) -> None:
    for name, secs in times.items():
        owner, _, attribute = name.rpartition(".")
        assert hasattr(pkgutil.resolve_name(owner), attribute), name
        setattr(pkgutil.resolve_name(owner), attribute, secs)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind, door_fd = sys.argv[1], int(sys.argv[2])
    lines = [socket.socket(fileno=os.dup(0))]
    if door_fd >= 0:
        lines.append(socket.socket(fileno=door_fd))
    gc.disable()
    for name in MODULES[kind]:
        if name not in OF_SOME_VERSIONS or importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    # What is imported is never garbage: looking at it would copy the pages of each process.
    gc.freeze()
    arguments, environment, folder = _forked_order(lines)
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if kind == "agents":
        os.setsid()
        _set_command_line([sys.executable, *arguments])
        _set_times(json.loads(environment.get(TIMES, "{}")))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _run(arguments)


if __name__ == "__main__":
    _main()
