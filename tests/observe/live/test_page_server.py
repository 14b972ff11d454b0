"""The page is served to those who may see it, with a policy, and as it changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from holdfast.observe.events.schema import AgentStarted, TrainerLost
from holdfast.observe.live.follower import Poll
from holdfast.observe.live.page_server import COOKIE, Feed, application
from holdfast.observe.live.snapshot import LiveView, view_of_run
from holdfast.observe.reports.goodput import report_run

TOKEN = "0123456789abcdef"
VIEW = view_of_run("runs/<script>", report_run("r", []), None, steps=None, durable=[], problems=[])
Client = Callable[[aiohttp.ClientSession, str, Feed], Awaitable[None]]


def served(client: Client, token: str | None = None, view: LiveView = VIEW) -> None:
    """Runs a client against the server."""

    async def main() -> None:
        feed = Feed()
        feed.publish(Poll(view, [AgentStarted(pid=7, host="a")]))
        runner = web.AppRunner(application(feed, token), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                await client(session, url, feed)
        finally:
            await runner.cleanup()

    asyncio.run(main())


async def message(answer: aiohttp.ClientResponse) -> tuple[str, Any]:
    """The next message of a stream: its name and its data."""
    async with asyncio.timeout(20):
        lines = []
        while (line := (await answer.content.readline()).decode().rstrip("\n")) or not lines:
            lines.append(line)
    fields = dict(one.split(": ", 1) for one in lines if one)
    return fields["event"], json.loads(fields["data"])


def test_each_file_has_the_policy_and_nothing_names_another_server() -> None:
    async def client(session: aiohttp.ClientSession, url: str, feed: Feed) -> None:
        for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
            async with session.get(url + path) as answer:
                text = await answer.text()
                assert answer.status == 200
                assert answer.content_type == f"text/{kind}"
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "script-src 'self';" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
            # Names of SVG's elements are no addresses to load from.
            assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
            assert "innerHTML" not in text
        async with session.get(f"{url}/../pyproject.toml") as answer:
            assert answer.status == 404

    served(client)


def test_the_stream_begins_with_the_state_and_goes_on_with_each_change() -> None:
    async def client(session: aiohttp.ClientSession, url: str, feed: Feed) -> None:
        async with session.get(f"{url}/stream") as answer:
            name, events = await message(answer)
            assert (name, events[0]["name"], events[0]["number"]) == (
                "happened",
                "agent_started",
                1,
            )
            assert await message(answer) == ("state", json.loads(feed.view))
            lost = TrainerLost(rank=0, pid=3, last_step=9, host="<b>")
            feed.publish(Poll(replace(VIEW, step=10), [lost]))
            name, events = await message(answer)
            assert [e["number"] for e in events] == [2]
            assert "<b>" in events[0]["text"]
            assert (await message(answer))[1]["step"] == 10
        async with session.get(f"{url}/stream", headers={"Last-Event-ID": "1"}) as answer:
            name, events = await message(answer)
            assert [e["number"] for e in events] == [2]
        for wrong in ("99", "-1", "many"):
            async with session.get(f"{url}/stream", headers={"Last-Event-ID": wrong}) as answer:
                name, events = await message(answer)
                assert [e["number"] for e in events] == [1, 2]

    served(client)


@pytest.mark.parametrize("name", ["evil.example:80", "[evil]", "evil@localhost", ""])
def test_without_a_token_only_loopback_names_are_answered(name: str) -> None:
    async def client(session: aiohttp.ClientSession, url: str, feed: Feed) -> None:
        for path in ("/", "/stream", "/page.js"):
            async with session.get(url + path, headers={"Host": name}) as answer:
                assert answer.status == 403
        port = url.rpartition(":")[2]
        for own in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            async with session.get(url, headers={"Host": own}) as answer:
                assert answer.status == 200

    served(client)


def test_with_a_token_nothing_is_served_without_it_and_it_leaves_the_address() -> None:
    async def client(session: aiohttp.ClientSession, url: str, feed: Feed) -> None:
        for path in ("/", "/stream", "/page.js", "/?token=wrong", "/?token="):
            async with session.get(url + path, allow_redirects=False) as answer:
                assert answer.status == 401, path
        async with session.get(f"{url}/?token={TOKEN}", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
        async with session.get(url) as answer:
            assert answer.status == 200
        session.cookie_jar.clear()
        async with session.get(url, headers={"Cookie": f"{COOKIE}=wrong"}) as answer:
            assert answer.status == 401

    served(client, TOKEN)
