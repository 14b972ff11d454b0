"""A real Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.hosts import wait_until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


def chromium_path() -> str | None:
    return shutil.which("chromium")


class Tab:
    """One page of the browser. `requests` are the addresses that it has asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Any) -> None:
        self._loop = loop
        self._socket = socket
        self._number = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        """What the page has written to its console, and what its policy has refused."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._call(method, parameters))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        script = f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"
        return str(self.value(script))

    def await_text(self, selector: str, part: str, secs: float = 30.0) -> None:
        wait_until(lambda: part in self.text(selector), secs)

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def screenshot(self, path: Path, *, width: int, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", height=1000, **size)
        time.sleep(0.5)
        height = self.value("document.documentElement.scrollHeight")
        self.call("Emulation.setDeviceMetricsOverride", height=height, **size)
        time.sleep(0.5)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(30):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == self._number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        found = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif message["method"] == "Log.entryAdded":
            self.complaints.append(found["entry"]["text"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(found["exceptionDetails"]))
        elif message["method"] == "Runtime.consoleAPICalled":
            self.complaints.append(str(found["args"]))


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A new browser with an empty page."""
    path = chromium_path()
    assert path is not None
    with tempfile.TemporaryDirectory(prefix="holdfast-chromium-") as folder:
        process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        loop = asyncio.new_event_loop()
        session = None
        try:
            port_file = Path(folder) / "DevToolsActivePort"
            wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") >= 1)
            port = port_file.read_text().splitlines()[0]
            session = loop.run_until_complete(_session())
            socket = loop.run_until_complete(_connect(session, port))
            yield Tab(loop, socket)
            loop.run_until_complete(socket.close())
        finally:
            if session is not None:
                loop.run_until_complete(session.close())
            loop.close()
            process.terminate()
            process.wait(240)


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


async def _connect(session: aiohttp.ClientSession, port: str) -> aiohttp.ClientWebSocketResponse:
    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
        targets = await answer.json()
    (page,) = [one for one in targets if one["type"] == "page"]
    return await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=1 << 26)
