"""One standby process: the command itself, stopped before its first line, with its imports made.

It and its startup (`startup/sitecustomize.py`) exchange lines of JSON over a socket. Nothing here
waits for it but `fork`. See docs/decisions/0056.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.format.json_codec import decode
from holdfast.supervise.command import Child, CommandNotRunError, spawn
from holdfast.trainer.process.imports import ImportRecord

CHANNEL_VARIABLE = "_HOLDFAST_STANDBY_CHANNEL"
FORK_SECS = 5.0
"""How long a fork may take to answer."""


class Answer(msgspec.Struct, frozen=True):
    """What the standby process reports once it has imported.

    Attributes:
        modules: All that it has.
        failed: The modules that cannot be imported.
        own: The variables that the program itself changes before it imports.
        files: Path, time of change in ns, and size of what was imported.
        problem: Why it cannot be forked.
    """

    modules: list[str]
    failed: list[str]
    own: dict[str, str | None]
    files: list[tuple[str, int, int]]
    problem: str | None


class StandbyError(Exception):
    """The standby process cannot be used; the message is the reason."""


class StandbyProcess:
    """One standby process.

    Args:
        command: The command.
        environment: The environment of the attempts.
        search_path: The entry that Python will put first on `sys.path`.
        record: The imports of the last attempt.
        own: The variables that it sets while it imports.

    Raises:
        StandbyError: It cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        search_path: str,
        record: ImportRecord,
        own: Mapping[str, str | None],
    ) -> None:
        self.record = record
        self._environment = dict(environment)
        self.answer: Answer | None = None
        """Its report, once it is ready."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            variables = {CHANNEL_VARIABLE: str(theirs.fileno())}
            try:
                self.pid = spawn(command, {**environment, **variables}, [theirs.fileno()])
            except CommandNotRunError as error:
                raise StandbyError(str(error)) from error
        self._pidfd = os.pidfd_open(self.pid)
        order = msgspec.structs.asdict(record) | {"path": search_path, "own": dict(own)}
        self._unsent = msgspec.json.encode(order) + b"\n"
        self._received = b""
        self._channel.setblocking(False)

    def poll(self) -> Answer | None:
        """Exchange order and report without waiting; return its report, if it is ready.

        Raises:
            StandbyError: It has ended.
        """
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
            while not self._received.endswith(b"\n") or self.answer is not None:
                piece = self._channel.recv(1 << 16)
                if not piece:
                    raise StandbyError("it has ended")
                self._received += piece
        except BlockingIOError:
            return self.answer
        except OSError as error:
            raise StandbyError(f"it has ended: {error.strerror}") from error
        self.answer = decode(self._received, Answer)
        return self.answer

    def covers(self, record: ImportRecord) -> bool:
        """Return whether it has imported, or tried, the modules of a record in its environment."""
        modules = {*self.record.modules}
        if self.answer is not None:
            modules |= {*self.answer.modules, *self.answer.failed}
        is_same = record.changed.keys() == self.record.changed.keys()
        return is_same and modules.issuperset(record.modules)

    def changed_file(self) -> str | None:
        """Return the path of a file that is not as it was when it was imported."""
        for path, time_ns, size_bytes in self.answer.files if self.answer is not None else ():
            try:
                state = os.stat(path)
            except OSError:
                return path
            if (state.st_mtime_ns, state.st_size) != (time_ns, size_bytes):
                return path
        return None

    def fork(self, environment: Mapping[str, str]) -> Child:
        """Return a fork, which continues to the program with the given environment.

        Raises:
            StandbyError: It has ended or does not answer.
        """
        changes = {
            name: environment.get(name)
            for name in {**self._environment, **environment}
            if environment.get(name) != self._environment.get(name)
        }
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(FORK_SECS)
            try:
                with theirs:
                    request = msgspec.json.encode(changes)
                    socket.send_fds(self._channel, [request], [theirs.fileno()])
                child = Child(int(ours.recv(32)))
                ours.sendall(b"\n")
            except (OSError, ValueError) as error:
                raise StandbyError(f"its fork did not answer: {error}") from error
        return child

    def memory_bytes(self) -> tuple[int, int]:
        """Return its memory: its share of it, and what no other process uses.

        Raises:
            StandbyError: It has ended.
        """
        try:
            fields = Path(f"/proc/{self.pid}/smaps_rollup").read_text().split()
        except OSError as error:
            raise StandbyError(f"it has ended: {error.strerror}") from error
        sizes = {name: int(fields[i + 1]) for i, name in enumerate(fields) if name.endswith(":")}
        return sizes["Pss:"] << 10, (sizes["Private_Clean:"] + sizes["Private_Dirty:"]) << 10

    def hurry(self) -> None:
        """Give it this process's priority while it imports."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0))

    def end(self) -> None:
        """Kill it. Forks that have begun their program go on."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
