"""Call an agent: one HTTP request at a time over its Unix socket, one connection per thread.

Every wait has two bounds. A running agent answers `status` at once, whatever else it does: an agent
that gives no answer for two times `PULSE_SECS` counts as gone (it was stopped, or its host hangs).
A call to a running agent ends after `CALL_SECS`, which storage may need.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast import errors, waits
from holdfast.local_agent.http_format import (
    HEAD_END,
    HEAD_SIZE_MAX_BYTES,
    HttpFormatError,
    parse_answer,
    request,
)
from holdfast.local_agent.messages import ErrorAnswer, decode
from holdfast.local_agent.place import peer, socket_address

PULSE_SECS = 10.0
CALL_SECS = 600.0
PIECE_SIZE_BYTES = 64 * 1024

Answer = TypeVar("Answer", bound=msgspec.Struct)


class _Status(msgspec.Struct, frozen=True):
    """The call `status`, which every agent answers, and of its answer what all have: nothing."""


class AgentGoneError(Exception):
    """The agent does not answer; the caller decides whether to start another."""


class AgentSilentError(AgentGoneError):
    """A process has the agent's place and gives no answer, so no other agent can be started.

    The message names the process, and what to do.

    Attributes:
        folder: The agent's folder.
    """

    def __init__(self, folder: Path, pid: int, secs: float) -> None:
        text = f"no answer for {secs:.0f} s from its agent, process {pid or 'unknown'} in {folder}"
        if pid and is_suspended(pid):
            text += (
                f", which is suspended (SIGSTOP): continue it with `kill -CONT {pid}`; if it is "
                "ended instead, the next agent finds what it has in RAM"
            )
        else:
            text += ": its host or its storage may hang; wait until it answers, or end it"
        super().__init__(text)
        self.folder = folder


def is_suspended(pid: int) -> bool:
    """Return whether a signal has stopped the process, or a debugger holds it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.partition(":\t")[::2] for line in lines)
    return fields.get("State", "")[:1] in ("T", "t") or fields.get("TracerPid", "0") != "0"


class _UnixConnection:
    """One connection; `sock` is None until the first request, and after `close`."""

    def __init__(self, folder: Path, timeout_secs: float) -> None:
        self.sock: socket.socket | None = None
        self._has_ended = False
        self._timeout_secs = min(timeout_secs, PULSE_SECS)
        self._folder = folder
        self.pid = 0
        """The agent's process; 0 if it is not known."""

    def send_request(self, name: str, body: bytes) -> None:
        """Send a request; connect first where there is no connection."""
        sock = self.sock if self.sock is not None else self._connect()
        sock.sendall(request(name, body))

    def receive(self) -> tuple[int, bytes]:
        """Receive the answer: its status and its body.

        Raises:
            OSError: the connection broke, or no byte came within the timeout.
            HttpFormatError: what came is no answer.
        """
        data = bytearray()
        while (end := data.find(HEAD_END)) < 0:
            if len(data) > HEAD_SIZE_MAX_BYTES:
                raise HttpFormatError("the answer's header does not end")
            data += self._receive_some()
        head = parse_answer(bytes(data[:end]))
        del data[: end + len(HEAD_END)]
        while len(data) < head.size_bytes:
            data += self._receive_some()
        if not head.keeps_open:
            self.close()
        return head.status, bytes(data)

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        sock, self.sock = self.sock, None
        if sock is not None:
            sock.close()

    def end(self) -> None:
        """Close the connection for good: the next request fails."""
        self._has_ended = True
        self.close()

    def _receive_some(self) -> bytes:
        piece = _socket(self).recv(PIECE_SIZE_BYTES)
        if not piece:
            raise ConnectionResetError("the connection ended before the answer")
        return piece

    def _connect(self) -> socket.socket:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        # Through a descriptor: the path of a Unix socket has at most 107 bytes.
        folder_fd = os.open(self._folder, flags)
        try:
            sock = self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            if self._has_ended:
                # Checked once the socket can be seen: `end`, on another thread, closes it or is
                # seen here.
                raise ConnectionAbortedError("the connection was closed for good")
            sock.settimeout(self._timeout_secs)
            sock.connect(socket_address(folder_fd))
        finally:
            os.close(folder_fd)
        self.pid, uid = peer(sock)
        if uid != os.geteuid():
            # Send nothing to another user's process.
            self.close()
            raise PermissionError(
                f"the socket in {self._folder} is of user {uid}, expected user {os.geteuid()}"
            )
        return sock


class LocalAgentClient:
    """A connection to the agent in `folder`; used by one thread at a time.

    Every agent has a call `status`, which it answers at once. A subclass may bound the time of
    other calls (`call_secs`), and report what one waits for (`is_alive`).
    """

    def __init__(self, folder: Path, timeout_secs: float | None = None) -> None:
        self.folder = folder
        self._timeout_secs = timeout_secs
        self._connection = _UnixConnection(folder, timeout_secs or CALL_SECS)

    def call(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Make one call and return its answer.

        Raises:
            AgentGoneError: there is no answer; it is unknown whether the call took effect.
            AgentSilentError: likewise, and the agent's process lives.
            AgentUnavailableError: the agent runs, and the timeout has expired; it is unknown
                whether the call took effect.
            HoldfastError: the agent's own error, as the class that it names.
        """
        is_answered = False
        try:
            self._connection.send_request(name, msgspec.json.encode(message))
            self._await_answer(name)
            status, body = self._connection.receive()
            is_answered = True
        except (TimeoutError, BlockingIOError) as error:
            # The second one: the queue of connections that the agent has not accepted is full.
            secs = min(self._timeout_secs or math.inf, 2 * PULSE_SECS)
            raise AgentSilentError(self.folder, self._connection.pid, secs) from error
        except (OSError, HttpFormatError) as error:
            raise AgentGoneError(f"{name}: {type(error).__name__}: {error}") from error
        finally:
            if not is_answered:
                # Also after a Ctrl-C: the next call would otherwise read the answer to this one.
                self._connection.close()
        if status == 200:
            return decode(body, kind)
        raise _failure(body)

    def _await_answer(self, name: str) -> None:
        """Wait until an answer begins, for as long as the agent answers `status`."""
        timeout_secs = self._timeout_secs or self.call_secs(name)
        if timeout_secs <= PULSE_SECS:
            # The connection's own timeout is the bound.
            return
        answer = select.poll()
        answer.register(_socket(self._connection), select.POLLIN)
        for _ in range(math.ceil(timeout_secs / PULSE_SECS)):
            if _has_answer(answer):
                return
            if not self.is_alive(name):
                raise TimeoutError(f"no answer, and no sign of life for {2 * PULSE_SECS:.0f} s")
        raise errors.AgentUnavailableError(
            f"{name}: the agent in {self.folder} runs, but did not finish within "
            f"{timeout_secs:.0f} s; check whether its storage hangs"
        )

    def call_secs(self, name: str) -> float:
        """Return how long a call to an agent that runs may last."""
        return CALL_SECS

    def is_alive(self, name: str) -> bool:
        """Return whether the agent answers on another connection; the call `name` still waits."""
        with contextlib.suppress(AgentSilentError):
            return answers(self.folder)
        return False

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        self._connection.close()

    def end(self) -> None:
        """Close the connection for good, also under another thread's call, which fails."""
        self.abort()
        self._connection.end()

    def fileno(self) -> int | None:
        """Return the connection's descriptor, or None if it is closed."""
        sock = self._connection.sock
        return sock.fileno() if sock is not None else None

    def abort(self) -> None:
        """Make a waiting call fail; called from another thread."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                # Closing the descriptor would not wake a thread that waits on it.
                sock.shutdown(socket.SHUT_RDWR)


def _has_answer(answer: select.poll) -> bool:
    """Wait for up to `PULSE_SECS` until an answer begins, and return whether it does."""
    left_secs = PULSE_SECS
    while left_secs > 0:
        secs = waits.slice_secs(left_secs)
        if answer.poll(secs * 1000):
            return True
        # Afterwards, so that a call of an ended wait still gets an answer that takes no time.
        waits.check()
        left_secs -= secs
    return False


def _socket(connection: _UnixConnection) -> socket.socket:
    sock = connection.sock
    if sock is None:
        raise ConnectionError("the connection was closed")
    return sock


def _failure(body: bytes) -> errors.HoldfastError:
    try:
        failure = decode(body, ErrorAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return errors.AgentUnavailableError(f"the agent answered {body[:200]!r}")
    return errors.error_named(failure.error, failure.message)


def answers(folder: Path) -> bool:
    """Return whether an agent of this user runs in `folder` and answers.

    Raises:
        AgentSilentError: one runs there and does not answer.
    """
    return ask_status(folder, _Status(), _Status) is not None


def ask_status(folder: Path, message: msgspec.Struct, kind: type[Answer]) -> Answer | None:
    """Return the status of this user's agent in `folder`, or None if none runs there.

    Raises:
        AgentSilentError: one runs there and does not answer.
    """
    client = LocalAgentClient(folder, timeout_secs=PULSE_SECS)
    try:
        return client.call("status", message, kind)
    except AgentSilentError:
        raise
    except AgentGoneError:
        return None
    finally:
        client.close()
