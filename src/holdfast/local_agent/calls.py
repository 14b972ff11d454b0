"""Serve calls on an agent's Unix socket: each takes one struct and answers with one struct."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.local_agent.messages import ErrorAnswer, decode
from holdfast.local_agent.socket_server import SocketServer

BODY_SECS = 30.0

Handler = Callable[[Any, int], Awaitable[msgspec.Struct]]
"""Takes the message and the caller's pid."""

T = TypeVar("T")


def serve_calls(
    calls: Mapping[str, tuple[type[msgspec.Struct], Handler]], body_secs: float = BODY_SECS
) -> SocketServer:
    """Return a server of `calls`, for its own user alone.

    The head and the body of each call arrive within `body_secs`.
    """

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
    return msgspec.json.encode(ErrorAnswer(error=error, message=message))
