"""Serve the agent's HTTP routes on a Unix socket, for its own user alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from holdfast.agent import protocol
from holdfast.agent.agent_directory import peer
from holdfast.agent.service import Service
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.format.json_codec import decode

BODY_SIZE_MAX_BYTES = 64 * 1024 * 1024
BODY_SECS = 30.0

Handler = Callable[[Any, int], Awaitable[msgspec.Struct]]

T = TypeVar("T")


def application(service: Service, body_secs: float = BODY_SECS) -> web.Application:
    """Return the routes of one agent.

    Each takes one struct, whose body has to arrive within `body_secs`, and answers with one.
    """
    app = web.Application(client_max_size=BODY_SIZE_MAX_BYTES, middlewares=[_own_user_alone])
    routes: dict[str, tuple[type[msgspec.Struct], Handler]] = {
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
    for name, (kind, handler) in routes.items():
        app.router.add_post(f"/{name}", _route(kind, handler, body_secs))
    return app


def _route(
    kind: type[msgspec.Struct], handler: Handler, body_secs: float
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        try:
            try:
                async with asyncio.timeout(body_secs):
                    body = await request.read()
            except TimeoutError as error:
                raise InvalidArgumentError(
                    f"{request.path}: its body did not arrive within {body_secs} s"
                ) from error
            answer = await handler(decoded(request.path, body, kind), _peer(request)[0])
        except HoldfastError as error:
            failure = protocol.ErrorAnswer(error=type(error).__name__, message=str(error))
            return web.Response(status=400, body=msgspec.json.encode(failure))
        return web.Response(body=msgspec.json.encode(answer))

    return respond


def decoded(path: str, body: bytes, kind: type[T]) -> T:
    """Return the message of a request.

    Raises:
        InvalidArgumentError: it is not one of that kind.
    """
    try:
        return decode(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: not a {kind.__name__}: {error}") from error


def _peer(request: web.Request) -> tuple[int, int]:
    """Return (pid, uid) of the process that connected."""
    assert request.transport is not None
    return peer(request.transport.get_extra_info("socket"))


@web.middleware
async def _own_user_alone(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    _, uid = _peer(request)
    if uid != os.geteuid():
        raise web.HTTPForbidden(text=f"this agent serves user {os.geteuid()}, not user {uid}")
    return await handler(request)
