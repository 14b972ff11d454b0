"""Start the command of `holdfast run` in a process group of its own, forward signals and reap it.

The signal handler forwards each signal to that group at once. So a terminal's Ctrl-C, which only
`holdfast run` receives, reaches every process of the command exactly once. The group is not the
terminal's foreground group and cannot read from it, so the command's stdin is never a terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Protocol

import psutil

from holdfast.clock import Clock
from holdfast.errors import HoldfastError

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
REST_SECS = 10.0
"""How long the command's remaining processes may take to end before they are killed."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127


class CommandNotRunError(HoldfastError):
    """The command cannot be started: correct the command line.

    Attributes:
        code: The exit code that a shell would return: 127 if not found, 126 if not executable.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Signals:
    """The received signals. Handlers run on the main thread, which owns this object."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._group: int | None = None
        self._queued: list[int] = []

    @property
    def is_ending(self) -> bool:
        """Whether one of them requests the end of the command."""
        return any(number in ENDING for number in self.received)

    @contextlib.contextmanager
    def passed_on(self, start: Callable[[], Child]) -> Iterator[Child]:
        """Start a child and forward signals to its group while the block runs.

        Signals received during the start are queued and then forwarded. Earlier signals are
        discarded, except those that request the end: there was no child to receive them.
        """
        self.received = [number for number in self.received if number in ENDING]
        self._queued.clear()
        child = start()
        self._group = child.pid
        while self._queued:
            send(child.pid, self._queued.pop(0))
        try:
            yield child
        finally:
            self._group = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals while the block runs; signals ignored before (`nohup`) stay ignored."""
        before = {number: signal.getsignal(number) for number in PASSED_ON}
        try:
            for number, handler in before.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(number, self._handle)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._group is None:
            self._queued.append(number)
        else:
            send(self._group, number)


class Child:
    """One process of the command, a child of this process that leads a process group.

    Args:
        pid: The id of the process, which is also that of its group.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def wait(self, secs: float) -> int | None:
        """Wait for the process for up to `secs` seconds.

        Returns:
            The exit code, 128 + N if signal N ended the process; None if it is still running.
        """
        select.select([self._pidfd], [], [], secs)
        code = reap(self.pid)
        if code is None:
            return None
        os.close(self._pidfd)
        return code if code >= 0 else 128 - code

    def end(self, secs: float) -> int:
        """End the process and its group: SIGTERM, and SIGKILL after `secs` seconds.

        Returns:
            The exit code, as `wait` does.
        """
        send(self.pid, signal.SIGTERM)
        code = self.wait(secs)
        send(self.pid, signal.SIGKILL)
        while code is None:
            code = self.wait(secs)
        return code

    def end_rest(self, clock: Clock) -> None:
        """End the processes that remain in the group, so that none of them overlaps a restart.

        They receive SIGTERM, and SIGKILL after `REST_SECS`.
        """
        deadline = clock.monotonic() + REST_SECS
        number: int = signal.SIGTERM
        while send(self.pid, number):
            number = 0
            reap(self.pid)
            if clock.monotonic() >= deadline:
                send(self.pid, signal.SIGKILL)
                return
            clock.sleep(0.05)


class Starts(Protocol):
    """A way to start the command."""

    @property
    def has_trained(self) -> bool:
        """Whether the last process is known to have made progress."""
        ...

    def start(self, environment: Mapping[str, str]) -> Child:
        """Start the command with an environment.

        Raises:
            CommandNotRunError: The program does not exist, or cannot be executed.
        """
        ...

    def attend(self, child: Child) -> None:
        """Do what is due, several times a second while the process runs, and once after that."""
        ...

    def prepare(self) -> bool:
        """Go on with what makes the next start faster.

        Returns:
            Whether it is worth waiting for.
        """
        ...


class ColdStarts:
    """Start the command as a new program each time.

    Args:
        command: The program and its arguments.
        output_fd: The file for its stdout and stderr; None: those of this process.
    """

    has_trained = False

    def __init__(self, command: Sequence[str], output_fd: int | None = None) -> None:
        self._command = command
        self._output_fd = output_fd

    def start(self, environment: Mapping[str, str]) -> Child:
        return Child(spawn(self._command, environment, output_fd=self._output_fd))

    def attend(self, child: Child) -> None:
        pass

    def prepare(self) -> bool:
        return False


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    kept_fds: Collection[int] = (),
    output_fd: int | None = None,
    *,
    group: int | None = 0,
) -> int:
    """Start a program and return its id; `reap` reaps it.

    Args:
        command: The program and its arguments.
        environment: Its environment.
        kept_fds: The descriptors that it inherits besides stdin, stdout and stderr.
        output_fd: The file for its stdout and stderr; None: those of this process.
        group: Its process group; 0: one of its own; None: that of this process.

    Raises:
        CommandNotRunError: The program does not exist, or cannot be executed.
    """
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output_fd,
            stderr=output_fd,
            env=environment,
            process_group=group,
            pass_fds=kept_fds,
        )
    except FileNotFoundError as error:
        is_there = os.path.lexists(command[0])
        reason = (
            "the interpreter of its first line is not there" if is_there else "command not found"
        )
        raise CommandNotRunError(NOT_FOUND, f"run {command[0]}: {reason}") from error
    except OSError as error:
        reason = f"run {command[0] or repr('')}: {error.strerror}"
        raise CommandNotRunError(NOT_EXECUTABLE, reason) from error
    process.returncode = 0  # unknown; without one, `subprocess` would warn and reap it too
    return process.pid


def kill_left(pids: Collection[int], variable: str, value: str) -> None:
    """Kill the trainers that outlive the command, so that none of them overlaps a restart.

    torchrun gives each of its workers a session; if it is killed, they train on. SIGTERM would
    announce a preemption to the whole job.

    Args:
        pids: The trainers, some of which have ended.
        variable: The variable of the environment by which the command's processes are known.
        value: Its value, which no other command's processes have.
    """
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get(variable) == value:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, REST_SECS)


def send(group: int, number: int) -> bool:
    """Send a signal to a process group and return whether the group has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The group has a process, which now runs as another user.
        return True
    return True


def reap(pid: int) -> int | None:
    """Reap all children that have ended; return the exit code of `pid` if it is among them.

    The first process of a container inherits all orphans, which no other process would reap.
    """
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == 0:
            return code
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
