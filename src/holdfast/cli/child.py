"""The command that `holdfast run` runs: started in a process group of its own, and reaped.

Signals that arrive are passed on to that group at once, from the handler, so that a terminal's
Ctrl-C, which reaches `holdfast run` alone, reaches every process of the command exactly once. The
group is no terminal's foreground, so the command's stdin is never a terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

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
NOT_EXECUTABLE = 126
NOT_FOUND = 127


class CommandNotRunError(HoldfastError):
    """The command cannot be started: mend the command line. `code` is what a shell would say."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Signals:
    """The signals that arrived. Handlers run on the main thread, which owns all of this."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._group: int | None = None
        self._held_back: list[int] = []

    @property
    def is_told_to_end(self) -> bool:
        """Whether one of them asks to end."""
        return any(number in ENDING for number in self.received)

    @contextlib.contextmanager
    def passed_on(self, start: Callable[[], Child]) -> Iterator[Child]:
        """Within, signals go to the group of the child that `start` starts, also what came then.

        Signals that came before, and do not ask to end, were meant for nobody.
        """
        self.received = [number for number in self.received if number in ENDING]
        self._held_back.clear()
        child = start()
        self._group = child.pid
        while self._held_back:
            send(child.pid, self._held_back.pop(0))
        try:
            yield child
        finally:
            self._group = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Within, signals are passed on; those that were ignored before (`nohup`) stay ignored."""
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
            self._held_back.append(number)
        else:
            send(self._group, number)


class Child:
    """One process of the command, started.

    Raises:
        CommandNotRunError: the command is not there, or is no program.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        try:
            self._process = subprocess.Popen(command, stdin=stdin, env=environment, process_group=0)
        except FileNotFoundError as error:
            raise CommandNotRunError(NOT_FOUND, f"run {command[0]}: command not found") from error
        except OSError as error:
            reason = f"run {command[0]}: {error.strerror}"
            raise CommandNotRunError(NOT_EXECUTABLE, reason) from error
        self._pidfd = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._process.pid

    def wait(self, secs: float) -> int | None:
        """Its exit code (128 + N where signal N ended it), or None where it still runs."""
        select.select([self._pidfd], [], [], secs)
        reap(self._process)
        code = self._process.returncode
        if code is None:
            return None
        os.close(self._pidfd)
        return code if code >= 0 else 128 - code

    def end_rest(self, clock: Clock) -> None:
        """Ends what the command left running in its group, so that a restart finds nobody there."""
        deadline = clock.monotonic() + REST_SECS
        number: int = signal.SIGTERM
        while send(self.pid, number):
            number = 0
            reap(self._process)
            if clock.monotonic() >= deadline:
                send(self.pid, signal.SIGKILL)
                return
            clock.sleep(0.05)


def send(group: int, number: int) -> bool:
    """Sends a signal to a process group; whether there was anybody in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It runs as another user now; it is there.
        return True
    return True


def reap(process: subprocess.Popen[bytes]) -> None:
    """Notes the end of `process`, and lets go of every other child that has ended.

    As a container's first process we get the orphans of all others, which nobody else would reap.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
