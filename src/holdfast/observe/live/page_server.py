"""Serve the live page of a run: one page, its style and script, and a stream of server-sent events.

Invariants:
- Nothing is served to another machine without a token; without one, only requests that name a
  loopback host are answered, so that no page of another site can read this one by DNS.
- The page loads nothing from elsewhere and runs no script but its own, which a content security
  policy enforces. Data travels as JSON and is shown as text.
- A client that reads slowly delays neither the others nor the look at the run.

See docs/decisions/0035.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import resources

import msgspec
from aiohttp import web

from holdfast.errors import HoldfastError
from holdfast.observe.events.reader import line_of
from holdfast.observe.events.schema import Event, event_name
from holdfast.observe.live.follower import Poll, RunFollower
from holdfast.peers.address import names_loopback

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
COOKIE = "holdfast-token"
CLIENTS_MAX = 32
EVENTS_KEPT = 300
QUIET_SECS = 10.0
"""How long a stream may be silent: after it, a comment shows that the server is there."""
SEND_SECS = 15.0
"""How long a client may take to receive one message."""

log = logging.getLogger(__name__)


class ShownEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event as the page shows it; `number` counts from 1."""

    number: int
    name: str
    host: str
    text: str
    is_of_saves: bool


@dataclass(slots=True)
class Feed:
    """What the streams send: the state now, and the newest events. Owned by the event loop."""

    view: bytes = b""
    version: int = 0
    events: deque[ShownEvent] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    _count: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, poll: Poll) -> None:
        """Take the result of a look, and wake the streams."""
        self.view = msgspec.json.encode(poll.view)
        for event in poll.events[-EVENTS_KEPT:]:
            self._count += 1
            self.events.append(_shown(event, self._count))
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, version: int) -> bool:
        """Wait until there is something newer than `version`, for at most `QUIET_SECS`."""
        if self.version > version:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), QUIET_SECS)
        return self.version > version

    def messages(self, version: int, number: int) -> tuple[list[bytes], int]:
        """Return the messages after a version and an event, and the number of the newest event."""
        messages = []
        new = [event for event in self.events if event.number > number]
        if new:
            number = new[-1].number
            messages.append(_message("happened", msgspec.json.encode(new), number))
        if self.version > version and self.view:
            messages.append(_message("state", self.view, number))
        return messages, number


def _shown(event: Event, number: int) -> ShownEvent:
    return ShownEvent(
        number=number,
        name=event_name(event),
        host=event.host,
        text=line_of(event),
        is_of_saves=event.is_of_saves or event_name(event) == "progress",
    )


def _message(name: str, data: bytes, number: int) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), number, data)


def application(feed: Feed, token: str | None) -> web.Application:
    """Return the application that serves a feed.

    Args:
        feed: What is shown.
        token: What a client has to know; None: only loopback is served.
    """
    clients: set[web.StreamResponse] = set()
    files = {path: _file(name) for path, (name, _) in FILES.items()}

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refusal = refused(request, token)
        if refusal is not None:
            return refusal
        return await handler(request)

    async def file(request: web.Request) -> web.Response:
        kind = FILES[request.path][1]
        body = files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    async def stream(request: web.Request) -> web.StreamResponse:
        if len(clients) >= CLIENTS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{CLIENTS_MAX} pages are open already\n")
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        clients.add(response)
        try:
            await response.prepare(request)
            await _stream(feed, response, request.headers.get("Last-Event-ID", ""))
        except (ConnectionError, TimeoutError):
            # The page was closed, or its machine does not read.
            pass
        finally:
            clients.discard(response)
        return response

    app = web.Application(middlewares=[guard])
    for path in FILES:
        app.router.add_get(path, file)
    app.router.add_get("/stream", stream)
    return app


async def _stream(feed: Feed, response: web.StreamResponse, last_id: str) -> None:
    number = int(last_id) if last_id.isascii() and last_id.isdecimal() else 0
    # After a restart of the server numbers begin again.
    number = number if feed.events and number <= feed.events[-1].number else 0
    version = -1
    while True:
        if not await feed.wait(version):
            await asyncio.wait_for(response.write(b": still here\n\n"), SEND_SECS)
            continue
        messages, number = feed.messages(version, number)
        version = feed.version
        await asyncio.wait_for(response.write(b"".join(messages)), SEND_SECS)


def refused(request: web.Request, token: str | None) -> web.StreamResponse | None:
    """Return the answer to a request that may not see the page; None if it may."""
    if token is None:
        if names_loopback(request.headers.get("Host", "")):
            return None
        return web.Response(status=403, text="expected a loopback host in the address\n")
    query_token = request.query.get("token")
    if query_token is not None and hmac.compare_digest(query_token.encode(), token.encode()):
        # The token leaves the address, and so the history and the screen.
        moved = web.Response(status=303, headers={**HEADERS, "Location": "/"})
        moved.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
        return moved
    if hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
        return None
    return web.Response(status=401, text="open the page with its token: /?token=...\n")


async def serve(
    follower: RunFollower,
    listener: socket.socket,
    token: str | None,
    on_ready: Callable[[], None],
) -> None:
    """Serve the page of a run until cancelled.

    Args:
        follower: Looks at the run.
        listener: A listening socket.
        token: As in `application`.
        on_ready: Called once the page can be opened.
    """
    feed = Feed()
    runner = web.AppRunner(application(feed, token), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        on_ready()
        while True:
            try:
                feed.publish(await asyncio.to_thread(follower.poll))
            except HoldfastError as error:
                # Storage may be away for a while; the page keeps what it has.
                log.warning("%s", error)
            await asyncio.sleep(follower.poll_secs)
    finally:
        await runner.cleanup()


def _file(name: str) -> bytes:
    return resources.files("holdfast.observe.live").joinpath(name).read_bytes()
