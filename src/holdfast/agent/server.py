"""Serve the agent's calls on a Unix socket, for its own user alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from holdfast.agent import protocol
from holdfast.agent.service import Service
from holdfast.agent.socket_server import SocketServer
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.format.json_codec import decode

BODY_SECS = 30.0

Handler = Callable[[Any, int], Awaitable[msgspec.Struct]]

T = TypeVar("T")


def call_server(service: Service, body_secs: float = BODY_SECS) -> SocketServer:
    """Return the server of one agent.

    Each call takes one struct, whose head and body each arrive within `body_secs`, and answers with
    one struct.
    """
    calls: dict[str, tuple[type[msgspec.Struct], Handler]] = {
        "expect": (protocol.Empty, service.expect),
        "attach": (protocol.Attach, service.attach),
        "branch": (protocol.Branch, service.branch),
        "slot": (protocol.WantSlot, service.want_slot),
        "filling": (protocol.FillStarted, service.filling),
        "copied": (protocol.Copied, service.copied),
        "spare": (protocol.WantSpare, service.want_spare),
        "sealed": (protocol.Sealed, service.sealed),
        "abandoned": (protocol.Abandoned, service.abandoned),
        "watch": (protocol.Watch, service.watch),
        "judged": (protocol.Judged, service.judged),
        "request": (protocol.RequestSave, service.request_save),
        "delete": (protocol.Delete, service.delete),
        "peers": (protocol.Empty, service.peers),
        "report": (protocol.EventReport, service.report),
        "detach": (protocol.Detach, service.detach),
        "status": (protocol.Empty, service.status),
        "job": (protocol.Empty, service.job),
        "stop": (protocol.Stop, service.stop),
    }

    async def respond(name: str, body: bytes, pid: int) -> tuple[int, bytes]:
        kind, handler = calls[name]
        try:
            result = await handler(decoded(name, body, kind), pid)
        except HoldfastError as error:
            return 400, _refusal(type(error).__name__, str(error))
        return 200, msgspec.json.encode(result)

    return SocketServer(
        frozenset(calls),
        respond,
        lambda reason: _refusal(InvalidArgumentError.__name__, reason),
        body_secs,
    )


def decoded(name: str, body: bytes, kind: type[T]) -> T:
    """Return the message of a request.

    Raises:
        InvalidArgumentError: it is not one of that kind.
    """
    try:
        return decode(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"/{name}: not a {kind.__name__}: {error}") from error


def _refusal(error: str, message: str) -> bytes:
    return msgspec.json.encode(protocol.ErrorAnswer(error=error, message=message))
