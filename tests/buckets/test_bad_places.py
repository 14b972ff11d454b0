"""A place that cannot be used is one clear error, of the manager and of the commands.

Nothing is changed there.
"""

from __future__ import annotations

import http.server
import re
import threading
import time
from collections.abc import Callable

import pytest

import holdfast
from holdfast import CheckpointManager
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    NotARunError,
    StorageError,
    StorageRefusedError,
)
from holdfast.store.bucket.object_service import connect
from holdfast.store.location import open_durable
from tests.buckets.fault_proxy import FaultProxy
from tests.hosts import Host
from tests.ports import free_port

COMMANDS = (
    ("ls",),
    ("show",),
    ("verify",),
    ("rm", "1", "--yes"),
    ("events",),
    ("status",),
)
REFUSALS = {
    "refused": r"(list|read) \S+ in s3://.* lacks a permission.*needs s3:(ListBucket|GetObject)",
    "wrong region": r"another region.*set AWS_REGION",
    "skewed": r"refuses this host's time.*set its clock",
    "expired": r"have expired.*renew them",
}


def errors_of(place: str, capsys: pytest.CaptureFixture[str]) -> list[HoldfastError | str]:
    """What the manager raises, what `open_run` raises, and what each command prints."""
    found: list[HoldfastError | str] = []
    opens: list[Callable[[str], object]] = [CheckpointManager, holdfast.open_run]
    for opened in opens:
        with pytest.raises(HoldfastError) as caught:
            opened(place)
        found.append(caught.value)
    for name, *rest in COMMANDS:
        capsys.readouterr()
        assert main([name, place, *rest]) in (1, 2), name
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert printed.err.strip(), name
        found.append(" ".join((printed.err + printed.out).split()))
    return found


def check_all(found: list[HoldfastError | str], kind: type[HoldfastError], pattern: str) -> None:
    for number, one in enumerate(found):
        if isinstance(one, HoldfastError):
            assert isinstance(one, kind), repr(one)
        assert re.search(pattern, str(one)), (number, str(one))


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_is_named_with_its_request_by_the_manager_and_by_each_command(
    refusal: str,
    one_host: Host,
    proxy: FaultProxy,
    proxied_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proxy.choose = lambda request: refusal
    check_all(errors_of(proxied_url, capsys), StorageRefusedError, REFUSALS[refusal])
    # Refused requests are not repeated, and nothing was tried after them.
    assert not {request.method for request in proxy.requests} - {"GET", "HEAD"}


def test_a_bucket_that_does_not_exist_is_named_and_not_made(
    one_host: Host, proxy: FaultProxy, proxied_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = errors_of("s3://no-such-bucket/runs/one", capsys)
    check_all(found, StorageRefusedError, r"s3://no-such-bucket.*expected a bucket, found none")
    assert not {request.method for request in proxy.requests} - {"GET", "HEAD"}


def test_a_prefix_with_other_objects_is_no_run_for_the_manager_and_each_command(
    one_host: Host, proxy: FaultProxy, proxied_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_durable(proxied_url, SystemClock())
    store.put("data/other", b"data")
    proxy.requests.clear()
    check_all(errors_of(proxied_url, capsys), NotARunError, r"run")
    assert not {request.method for request in proxy.requests} - {"GET", "HEAD"}
    assert [stored.key for stored in store.list("data")] == ["data/other"]


@pytest.mark.parametrize("place", ["s3://", "s3:///runs/one", "s4://runs/one", "s3:/runs/one"])
def test_a_url_with_a_typo_is_refused_by_the_manager_and_each_command(
    place: str, one_host: Host, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    check_all(errors_of(place, capsys), InvalidArgumentError, r"s[34]:/")
    assert not list(tmp_path.iterdir())


def test_one_call_reads_a_run_at_a_url_and_saves_to_paths_alone(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.save(1, {"step": 1}, force=True)
    assert holdfast.load(proxied_url) == {"step": 1}
    proxy.requests.clear()
    with pytest.raises(InvalidArgumentError, match="with a CheckpointManager"):
        holdfast.save(proxied_url, {"step": 2})
    assert not proxy.requests


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:1", "", "http://", "ftp://me:secret@a:1", "http://a:99999"]
)
def test_an_endpoint_that_is_no_url_is_named_without_a_secret(
    endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(
        InvalidArgumentError, match="expected AWS_ENDPOINT_URL to be https://HOST"
    ) as caught:
        holdfast.open_run(url)
    assert "secret" not in str(caught.value)
    # The client does not use it then.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(InvalidArgumentError, match="AWS_ENDPOINT_URL_S3 is an address without"):
        holdfast.open_run(url)


def test_an_endpoint_without_encryption_needs_a_leave(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(InvalidArgumentError, match="which needs AWS_ALLOW_HTTP=true"):
        holdfast.open_run(url)


@pytest.mark.parametrize("missing", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_a_key_is_named_without_its_value(
    missing: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(missing)
    with pytest.raises(InvalidArgumentError, match=rf"alone; set {missing} too") as caught:
        holdfast.open_run(url)
    assert "holdfast-secret" not in str(caught.value)


class _Page(http.server.BaseHTTPRequestHandler):
    """A web server that is no object store."""

    status = 200

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = b"<html><body>welcome</body></html>"
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _MissingPage(_Page):
    status = 404


@pytest.mark.parametrize("page", [_Page, _MissingPage])
def test_an_endpoint_that_is_no_object_store_is_named_at_once(
    page: type[_Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-0f2e")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), page) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            for scheme, problem in (
                ("http", f"expected an object store at http://{address}, found a page of HTML"),
                ("https", f"expected TLS at https://{address}, found an answer without it"),
            ):
                monkeypatch.setenv("AWS_ENDPOINT_URL", f"{scheme}://{address}")
                began = time.monotonic()
                with pytest.raises(StorageRefusedError, match=re.escape(problem)):
                    holdfast.open_run("s3://bucket/run")
                assert time.monotonic() - began < 30
        finally:
            server.shutdown()


def test_a_port_where_nothing_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-0f2e")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(StorageError, match=rf"127.0.0.1:{port}, found that nothing listens there"):
        connect("s3://bucket").get("run/holdfast.json", 100)
