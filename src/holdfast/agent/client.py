"""Talking to an agent: one HTTP request over its Unix socket at a time, a connection a thread."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast import errors
from holdfast.agent import protocol
from holdfast.agent.location import SOCKET, socket_address

CALL_SECS = 120.0

Answer = TypeVar("Answer", bound=msgspec.Struct)


class AgentGoneError(Exception):
    """The agent does not answer; whoever calls decides whether to start another."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, folder: Path, timeout_secs: float) -> None:
        super().__init__("agent", timeout=timeout_secs)
        self._folder = folder

    def connect(self) -> None:
        folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(socket_address(folder_fd))
        finally:
            os.close(folder_fd)


class AgentClient:
    """A connection to the agent that lives in `folder`; for one thread at a time."""

    def __init__(self, folder: Path, timeout_secs: float = CALL_SECS) -> None:
        self.folder = folder
        self._connection = _UnixConnection(folder, timeout_secs)

    def call(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """One call.

        Raises:
            AgentGoneError: there is no answer; it is not known whether the call had its effect.
            HoldfastError: the agent's own answer, as the class that it names.
        """
        try:
            self._connection.request("POST", f"/{name}", msgspec.json.encode(message))
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise AgentGoneError(f"{name}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return msgspec.json.decode(body, type=kind)
        raise _failure(body)

    def close(self) -> None:
        """Closes the connection; a later call opens it again."""
        self._connection.close()

    def abort(self) -> None:
        """From another thread: makes a call that is waiting fail."""
        found = self._connection.sock
        if found is not None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


def _failure(body: bytes) -> errors.HoldfastError:
    try:
        failure = msgspec.json.decode(body, type=protocol.Failure)
    except msgspec.DecodeError:
        return errors.AgentUnavailableError(f"the agent answered {body[:200]!r}")
    kind = getattr(errors, failure.error, errors.HoldfastError)
    return kind(failure.message)


def answers(folder: Path) -> bool:
    """Whether an agent lives in `folder` and answers."""
    if not (folder / SOCKET).exists():
        return False
    client = AgentClient(folder, timeout_secs=10.0)
    try:
        client.call("status", protocol.Empty(), protocol.Status)
    except AgentGoneError:
        return False
    finally:
        client.close()
    return True
