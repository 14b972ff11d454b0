"""A service with TLS: its certificate, and which signatures cover the bytes of a request."""

from __future__ import annotations

import shutil
import ssl
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.errors import StorageError, StorageRefusedError
from holdfast.store.bucket.bucket import PART_SIZE_MIN_BYTES
from holdfast.store.location import RunLocation, open_durable
from holdfast.store.unfinished_uploads import UnfinishedUploads
from tests.buckets.fault_proxy import FaultProxy
from tests.peers import Authority

UNSIGNED = "UNSIGNED-PAYLOAD"


def digests_of(proxy: FaultProxy, url: str) -> tuple[set[str], set[str]]:
    """Put an image and a record; return the signed digests of the parts, and of the record."""
    store = open_durable(url, SystemClock())
    image = np.random.default_rng(0).bytes(PART_SIZE_MIN_BYTES + 1)
    store.put("image", image)
    store.put_if_absent("record", b"{}")
    assert store.get("record") == b"{}"
    with store.open("image") as reader:
        found = bytearray(len(image))
        reader.read_into(0, memoryview(found))
    assert found == image
    parts, records = (
        {digest for path, digest in proxy.signed if name in path}
        for name in ("/image?partNumber=", "/record")
    )
    assert parts
    assert records
    return parts, records


@pytest.fixture
def over_tls(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the proxy speak TLS; what it passes on stays as it was signed."""
    own = Authority(tmp_path / "certificates").issue("proxy")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    # A handshake in the thread that accepts connections would keep others waiting.
    proxy.socket = context.wrap_socket(
        proxy.socket, server_side=True, do_handshake_on_connect=False
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{proxy.address}")
    monkeypatch.setenv("SSL_CERT_FILE", own.authority)
    # The machine's own, which boto3 prefers.
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)


def test_a_certificate_that_is_not_trusted_is_named_at_once(
    proxied_url: str, proxy: FaultProxy, over_tls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    began = time.monotonic()
    problem = rf"https://{proxy.address}, found another \(UnknownIssuer\);.* SSL_CERT_FILE"
    with pytest.raises(StorageRefusedError, match=problem):
        CheckpointManager(proxied_url)
    assert time.monotonic() - began < 30
    assert not proxy.requests


@pytest.mark.parametrize("content", [None, "none", "other"])
def test_an_unusable_file_of_authorities_is_named(
    proxied_url: str,
    proxy: FaultProxy,
    over_tls: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: str | None,
) -> None:
    path = tmp_path / "authorities.pem"
    if content == "none":
        path.write_text("none")
    elif content == "other":
        shutil.copyfile(Authority(tmp_path / "other").issue("other").authority, path)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    advice = {
        None: rf"SSL_CERT_FILE names {path}, which cannot be read \(No such file",
        "none": rf"SSL_CERT_FILE names {path}, which has no certificate",
        "other": f"add the certificate of its authority to {path}",
    }
    with pytest.raises(StorageRefusedError, match=advice[content]):
        CheckpointManager(proxied_url)
    assert not proxy.requests


def test_over_tls_the_bytes_of_parts_are_not_signed_and_those_of_records_are(
    proxied_url: str, proxy: FaultProxy, over_tls: None
) -> None:
    parts, records = digests_of(proxy, proxied_url)
    assert parts == {UNSIGNED}
    assert UNSIGNED not in records


def test_unfinished_uploads_are_listed_over_tls_of_an_authority_of_ones_own(
    proxied_url: str, proxy: FaultProxy, over_tls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    assert [*UnfinishedUploads(RunLocation(proxied_url)).list()] == []
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        [*UnfinishedUploads(RunLocation(proxied_url)).list()]
    assert "this request needs" not in str(caught.value)


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_environment_decides_whether_bytes_are_signed(
    proxied_url: str,
    proxy: FaultProxy,
    over_tls: None,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
) -> None:
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", value)
    parts, records = digests_of(proxy, proxied_url)
    assert [UNSIGNED in parts, UNSIGNED in records] == [value == "true"] * 2


def test_a_refused_part_without_a_signature_of_its_bytes_is_reported_with_the_way_out(
    proxied_url: str, proxy: FaultProxy, over_tls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.choose = lambda request: "refused" if "partNumber=" in request.path else None
    image = bytes(PART_SIZE_MIN_BYTES + 1)
    with pytest.raises(StorageRefusedError, match="set AWS_UNSIGNED_PAYLOAD=false"):
        open_durable(proxied_url, SystemClock()).put("image", image)
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "false")
    with pytest.raises(StorageRefusedError, match=r"s3:PutObject or its like$"):
        open_durable(proxied_url, SystemClock()).put("image", image)


def test_without_tls_all_bytes_are_signed(proxied_url: str, proxy: FaultProxy) -> None:
    parts, records = digests_of(proxy, proxied_url)
    assert UNSIGNED not in parts | records
