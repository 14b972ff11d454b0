"""The agent's HTTP routes, on a Unix socket that serves its own user alone."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from holdfast.agent import protocol
from holdfast.agent.service import Service
from holdfast.errors import HoldfastError, InvalidArgumentError

BODY_SIZE_MAX_BYTES = 64 * 1024 * 1024
_CREDENTIALS = struct.Struct("3i")

Handler = Callable[[Any, int], Awaitable[msgspec.Struct]]


def application(service: Service) -> web.Application:
    """The routes of one agent; each takes one struct and answers one."""
    app = web.Application(client_max_size=BODY_SIZE_MAX_BYTES, middlewares=[_own_user_alone])
    routes: dict[str, tuple[type[msgspec.Struct], Handler]] = {
        "attach": (protocol.Attach, service.attach),
        "branch": (protocol.Branch, service.branch),
        "slot": (protocol.WantSlot, service.want_slot),
        "sealed": (protocol.Sealed, service.sealed),
        "abandoned": (protocol.Abandoned, service.abandoned),
        "watch": (protocol.Watch, service.watch),
        "vote": (protocol.Vote, service.vote),
        "judged": (protocol.Judged, service.judged),
        "request": (protocol.RequestSave, service.request_save),
        "delete": (protocol.Delete, service.delete),
        "report": (protocol.Report, service.report),
        "detach": (protocol.Detach, service.detach),
        "status": (protocol.Empty, service.status),
        "stop": (protocol.Stop, service.stop),
    }
    for name, (kind, handler) in routes.items():
        app.router.add_post(f"/{name}", _route(kind, handler))
    return app


def _route(
    kind: type[msgspec.Struct], handler: Handler
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        try:
            try:
                message = msgspec.json.decode(await request.read(), type=kind)
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidArgumentError(
                    f"{request.path}: not a {kind.__name__}: {error}"
                ) from error
            answer = await handler(message, _peer(request)[0])
        except HoldfastError as error:
            failure = protocol.Failure(error=type(error).__name__, message=str(error))
            return web.Response(status=400, body=msgspec.json.encode(failure))
        return web.Response(body=msgspec.json.encode(answer))

    return respond


def _peer(request: web.Request) -> tuple[int, int]:
    """(pid, uid) of the process that connected, as the kernel vouches for it."""
    assert request.transport is not None
    peer: socket.socket = request.transport.get_extra_info("socket")
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


@web.middleware
async def _own_user_alone(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    _, uid = _peer(request)
    if uid != os.geteuid():
        raise web.HTTPForbidden(text=f"this agent serves user {os.geteuid()}, not user {uid}")
    return await handler(request)
