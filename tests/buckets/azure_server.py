"""An Azure Blob service of its own process on loopback: Azurite, of Microsoft, run by Node.js."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tests.hosts import wait_until
from tests.ports import free_port

CONTAINER = "runs"
ACCOUNT = "devstoreaccount1"
# Azurite's own account has a key that its documentation prints.
KEY = base64.b64encode(hashlib.sha512(b"holdfast").digest()).decode()
VERSION = "2021-08-06"


def program() -> str | None:
    """The server's program, where make installs it, or on the path."""
    beside = Path(sys.executable).parent.parent / "azurite" / "node_modules" / ".bin"
    found = shutil.which("azurite-blob", path=str(beside)) or shutil.which("azurite-blob")
    return found if shutil.which("node") else None


def environment(port: int) -> dict[str, str]:
    """What a client needs."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }


@contextlib.contextmanager
def running_azurite(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a server that runs meanwhile, with one empty container."""
    found = program()
    assert found is not None
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(found, "--skipApiVersionCheck", "--disableTelemetry", "--silent"),
                *("--blobPort", str(port), "--location", str(folder)),
            ],
            stdout=log,
            stderr=log,
            env={"PATH": str(Path(shutil.which("node") or "").parent), "AZURITE_ACCOUNTS": ""}
            | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}", "HOME": str(folder)},
        )
    try:
        wait_until(lambda: _made_container(port))
        yield environment(port)
    finally:
        process.kill()
        process.wait()


def _made_container(port: int) -> bool:
    """Whether the server answers and has made the container; obstore has no such request."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": VERSION}
    lines = [f"{name}:{value}\n" for name, value in headers.items()]
    resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    text = "PUT" + "\n" * 12 + "".join(lines) + resource
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    path = f"/{ACCOUNT}/{CONTAINER}?restype=container"
    try:
        connection.request("PUT", path, headers=headers | {"Content-Length": "0"})
        return connection.getresponse().status == 201
    except OSError:
        return False
    finally:
        connection.close()
