"""Another S3 server of its own process: moto, which keeps its objects in memory."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.buckets.s3_server import BUCKET
from tests.hosts import wait_until
from tests.ports import free_port


@contextlib.contextmanager
def running_moto(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a server that runs meanwhile, with one empty bucket."""
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
            env=os.environ | {"HOME": str(folder)},
        )
    try:
        wait_until(lambda: _made_bucket(port))
        yield {
            "AWS_ACCESS_KEY_ID": "moto-key",
            "AWS_SECRET_ACCESS_KEY": "moto-secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        process.kill()
        process.wait()


def _made_bucket(port: int) -> bool:
    """Whether the server answers and has made the bucket."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", f"/{BUCKET}")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
