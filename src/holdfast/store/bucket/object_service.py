"""The requests of S3, Google Cloud Storage and Azure Blob Storage, through the package obstore.

`connect` returns the client of one bucket. It is configured by the environment alone, with the
variables that the service's own tools use (docs/buckets.md), so that no credentials are part of a
URL, of an argument or of a message.

Small requests are tried once: `store.bucket.bucket` repeats them. The parts of an upload are
repeated here, because an upload cannot be continued from outside.

Invariant: a message has the service's code and explanation, and nothing else of its answer, which
may repeat what was signed; nor the query of a URL, which may be a signature.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from holdfast import waits
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    StorageRefusedError,
    StorageThrottledError,
    StorageUnreachableError,
)
from holdfast.format.digests import Buffer
from holdfast.store.bucket.aws_profile import missing_hint, profile_credentials
from holdfast.store.bucket.bucket import Head
from holdfast.store.bucket.upload_pace import PARTS_AT_ONCE
from holdfast.store.contract import StoredObject

PAGE_COUNT_MAX = 1_000
"""Keys in one page of a listing: the most that S3 returns."""
CONNECT_SECS = 5
REQUEST_SECS = 60
"""The time of one small request, and for which the bytes of a large answer may pause."""
ANSWER_SECS = 3600
"""The time of one large answer: 32 MiB, of 12 at once, at 0.1 MB/s in all."""
SILENT_SECS = 5
"""After this time without an answer a request in the main thread is logged."""
PART_SECS = 300
"""The time of one part: 16 MiB at 0.06 MB/s."""
PART_RETRY_SECS = 120
"""How long one part is repeated. It is signed once, and services refuse old signatures."""
PART_TRIES_MAX = 1_000
PART_PAUSE_SECS = 0.2
PART_PAUSE_MAX_SECS = 15.0
PIECE_SIZE_BYTES = 1024 * 1024
"""The least size of the pieces in which an answer is copied to its target."""
MESSAGE_CHARS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What differs between the services, beyond what obstore hides.

    Attributes:
        store: obstore's class.
        allow_http: The variable that allows requests without TLS, if it is "true".
        region: The variable of the region; None where a client needs none.
        permissions: The permission of each request, as the service names it.
        lists_from_keys: Whether a listing may begin after a key. If not, it is read from the
            beginning, in the order of keys.
    """

    store: str
    allow_http: str
    region: str | None
    permissions: Mapping[str, str]
    lists_from_keys: bool = True


S3 = ServiceOptions(
    store="S3Store",
    allow_http="AWS_ALLOW_HTTP",
    region="AWS_REGION",
    permissions={
        "create": "s3:PutObject",
        "put": "s3:PutObject",
        "upload": "s3:PutObject",
        "read": "s3:GetObject and s3:ListBucket",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
    },
)
GCS = ServiceOptions(
    store="GCSStore",
    allow_http="GOOGLE_ALLOW_HTTP",
    region=None,
    permissions={
        "create": "storage.objects.create",
        "put": "storage.objects.create and storage.objects.delete",
        "upload": "storage.multipartUploads.create, storage.objects.create and .delete",
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
)
AZURE = ServiceOptions(
    store="AzureStore",
    allow_http="AZURE_ALLOW_HTTP",
    region=None,
    permissions=dict.fromkeys(
        ("create", "put", "upload", "read", "list", "delete"), "Storage Blob Data Contributor"
    ),
    lists_from_keys=False,
)
SERVICES = {"s3": S3, "gs": GCS, "az": AZURE}
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""The client uses the first of them that is set."""
TRUSTED = "SSL_CERT_FILE"
"""The client's variable: the file with the certificates of authorities that it trusts."""
UNSIGNED_PAYLOAD = "AWS_UNSIGNED_PAYLOAD"
"""The client's variable: whether signatures leave out the bytes of requests."""
EXPIRED_CODES = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired")
PROVIDER = "External AWS credential provider"
"""How obstore names the source of credentials that it does not find by itself."""
PLAIN_TEXT_SIGNS = ("InvalidMessage", "InvalidContentType", "corrupt message")
"""How the client names an answer that is no TLS."""
KEY_PAIR = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
MISSING_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")

T = TypeVar("T")

log = logging.getLogger(__name__)


class ServiceBucket:
    """A `Bucket` of a service. Thread-safe."""

    def __init__(
        self, url: str, service: ServiceOptions, small: Any, large: Any, reading: Any
    ) -> None:
        """The last three are stores of obstore: for small requests, uploads and large answers."""
        import obstore
        from obstore import exceptions

        self._url = url
        self._service = service
        self._small = small
        self._large = large
        self._reading = reading
        self._api = obstore
        self._errors = exceptions
        self._is_silence_logged = False
        """Whether it was logged that the service does not answer, since it has last."""

    def __repr__(self) -> str:
        return f"ServiceBucket({self._url})"

    def put(self, key: str, blocks: Sequence[Buffer]) -> None:
        data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        self._request("put", key, lambda: self._put(self._small, key, data, use_multipart=False))

    def create(self, key: str, data: bytes) -> bool:
        def create() -> bool:
            try:
                self._put(self._small, key, data, mode="create", use_multipart=False)
            except self._errors.AlreadyExistsError:
                return False
            return True

        return self._request("create", key, create)

    def upload(self, key: str, parts: Iterator[memoryview], part_size_bytes: int) -> None:
        def upload() -> None:
            self._put(
                self._large,
                key,
                # The client makes a request of each part, and refers to it until that has ended.
                parts,
                use_multipart=True,
                chunk_size=part_size_bytes,
                max_concurrency=PARTS_AT_ONCE,
            )

        # Made here: left behind, it would read its parts while the caller ends them.
        self._translating("upload", key, upload)

    def _put(self, store: Any, key: str, data: object, **options: object) -> None:
        self._api.put(store, key, data, **options)

    def read_head(self, key: str) -> Head:
        def head() -> Head:
            meta = self._api.head(self._small, key)
            modified_ns = int(meta["last_modified"].timestamp() * 1_000_000) * 1_000
            return Head(meta["size"], meta["e_tag"] or "", modified_ns)

        return self._request("read", key, head)

    def read_into(self, key: str, version: str, start_bytes: int, target: memoryview) -> None:
        loan = _Loan(target)
        has_answered = threading.Event()

        def read() -> None:
            options: dict[str, object] = {"range": (start_bytes, start_bytes + len(target))}
            if version:
                options["if_match"] = version
            try:
                answer = self._api.get(self._reading, key, options=options)
            except self._errors.PreconditionError as error:
                raise ObjectNotFoundError(
                    f"read {key} in {self._url}: it was replaced while it was read"
                ) from error
            has_answered.set()
            # The client would join the pieces of a whole answer in memory that is new each time.
            filled_bytes = 0
            for piece in answer.stream(min_chunk_size=PIECE_SIZE_BYTES):
                stop_bytes = filled_bytes + len(piece)
                if stop_bytes <= len(target):
                    loan.store(filled_bytes, piece)
                filled_bytes = stop_bytes
            if filled_bytes != len(target):
                raise StorageError(
                    f"read {key} in {self._url}: expected {len(target)} bytes from "
                    f"{start_bytes} on, the answer has {filled_bytes}"
                )

        try:
            self._request("read", key, read, is_answering=has_answered.is_set)
        finally:
            loan.end()

    def get(self, key: str, size_max_bytes: int) -> bytes:
        def read() -> bytes:
            answer = self._api.get(self._small, key)
            if str(answer.attributes.get("Content-Type", "")).startswith("text/html"):
                raise StorageRefusedError(
                    f"read {key} in {self._url}: {_no_service(_endpoint_of_environment())}"
                )
            if answer.meta["size"] > size_max_bytes:
                return bytes(self._api.get_range(self._small, key, start=0, length=size_max_bytes))
            return bytes(answer.bytes())

        return self._request("read", key, read)

    def list_pages(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        # Some versions of Azure's protocol ignore the key to begin after, and obstore relies on it.
        is_skipping = not self._service.lists_from_keys
        offset = None if is_skipping else after or None
        pages = self._api.list(self._small, prefix=prefix, offset=offset, chunk_size=PAGE_COUNT_MAX)
        while True:
            page = self._request("list", prefix, lambda: next(pages, None))
            if page is None:
                return
            yield [
                StoredObject(entry["path"], entry["size"])
                for entry in page
                if not (is_skipping and entry["path"] <= after)
            ]

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            self._delete(keys)
        except ObjectNotFoundError:
            # Azure and Google end a deletion of several objects at a missing one.
            for key in keys:
                with contextlib.suppress(ObjectNotFoundError):
                    self._delete([key])

    def _delete(self, keys: Sequence[str]) -> None:
        call = functools.partial(self._api.delete, self._small, [*keys])
        self._request("delete", keys[0], call)

    def _request(
        self,
        request: str,
        key: str,
        call: Callable[[], T],
        is_answering: Callable[[], bool] = lambda: False,
    ) -> T:
        """Return the result of `call`, which an interruption may leave behind."""

        def log_silence() -> None:
            if not self._is_silence_logged and not is_answering():
                self._is_silence_logged = True
                log.warning(
                    "%s %s in %s: the service has not answered for %d s; the request is given up "
                    "after %d s, and repeated",
                    request,
                    key,
                    self._url,
                    SILENT_SECS,
                    REQUEST_SECS,
                )

        def answered() -> T:
            answer = waits.interruptible(call, log_silence, SILENT_SECS)
            self._is_silence_logged = False
            return answer

        return self._translating(request, key, answered)

    def _translating(self, request: str, key: str, call: Callable[[], T]) -> T:
        """Return the result of `call`; the client's exceptions become Holdfast's."""
        try:
            return call()
        except HoldfastError:
            raise
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise self._translated(request, key, error) from None

    def _translated(self, request: str, key: str, error: Exception) -> StorageError:
        text, where = str(error), f"{request} {key} in {self._url}"
        reason = explanation(text)
        if any(code in text for code in MISSING_BUCKET_CODES):
            return StorageRefusedError(
                f"{where}: expected a bucket, found none ({reason}); create it, or check the URL"
            )
        if isinstance(error, FileNotFoundError | self._errors.NotFoundError):
            return ObjectNotFoundError(f"{where}: there is no such object")
        if "RequestTimeTooSkewed" in text:
            return StorageRefusedError(
                f"{where}: the service refuses this host's time ({reason}); set its clock"
            )
        if "AuthorizationHeaderMalformed" in text or "incorrectly configured region" in text:
            return StorageRefusedError(
                f"{where}: the bucket is in another region ({reason}); set {self._service.region} "
                "to its region"
            )
        if re.search(r"169\.254\.|metadata\.google", text):
            return StorageRefusedError(
                f"{where}: no credentials are found in the environment, and no service of this "
                f"machine gives any ({reason}); see docs/buckets.md{missing_hint()}"
            )
        if PROVIDER in text:
            return StorageRefusedError(
                f"{where}: the profile of ~/.aws gives no credentials ({reason}); log in again, or "
                "correct the profile"
            )
        if any(code in text for code in EXPIRED_CODES):
            return StorageRefusedError(
                f"{where}: the credentials have expired ({reason}); renew them. Those of a profile "
                "and of a role are read again; those of the environment stay as they were when "
                "the process began"
            )
        # The client gives a listing's refusal no class of its own.
        if re.search(r"status code: 40[13]\b", text):
            return StorageRefusedError(
                f"{where}: the service refuses the credentials or lacks a permission for them "
                f"({reason}); this request needs {self._service.permissions[request]} or its like"
                f"{self._unsigned_hint(request)}"
            )
        if re.search(r"status code: (?:429|503)\b", text):
            return StorageThrottledError(f"{where}: {reason}")
        return _unreached(where, text) or StorageError(f"{where}: {reason}")

    def _unsigned_hint(self, request: str) -> str:
        """Return that an upload may be refused since the bytes of its parts are not signed."""
        if request != "upload" or self._service is not S3 or not _leaves_parts_unsigned():
            return ""
        return f". If the bucket's policy refuses unsigned payloads, set {UNSIGNED_PAYLOAD}=false"


class _Loan:
    """Memory that a request fills, until it is taken back: the request may have been abandoned."""

    def __init__(self, memory: memoryview) -> None:
        self._memory: memoryview | None = memory
        self._lock = threading.Lock()

    def store(self, start_bytes: int, piece: Buffer) -> None:
        """Copy a piece to that place; nothing after the end."""
        with self._lock:
            if self._memory is not None:
                self._memory[start_bytes : start_bytes + len(piece)] = piece

    def end(self) -> None:
        """Take the memory back."""
        with self._lock:
            self._memory = None


def _unreached(where: str, text: str) -> StorageError | None:
    """Return the error of an endpoint with which no client can talk; None if it is another one.

    Args:
        where: the request and its place.
        text: the client's error.
    """
    address = re.search(r"(https?://)(?:[^/\s@]*@)?([^/\s?)\"]+)", text)
    endpoint = f"{address[1]}{address[2]}" if address is not None else "its endpoint"
    if "Connection refused" in text:
        return StorageUnreachableError(
            f"{where}: expected a service at {endpoint}, found that nothing listens there "
            "(connection refused); check the endpoint and its port"
        )
    untrusted = re.search(r"InvalidCertificate(?:\(\s*(\w+))?", text)
    if untrusted is not None:
        return StorageRefusedError(
            f"{where}: expected a certificate that this machine trusts at {endpoint}, found "
            f"another ({untrusted[1] or 'invalid'}); {_trust_advice()}, or correct the endpoint"
        )
    if any(name in text for name in PLAIN_TEXT_SIGNS):
        return StorageRefusedError(
            f"{where}: expected TLS at {endpoint}, found an answer without it; use http:// for a "
            "service without TLS, or the port of TLS"
        )
    if re.search(r"status code: 4\d\d\b", text) and re.search(r"<(?:!doctype )?html", text, re.I):
        return StorageRefusedError(f"{where}: {_no_service(endpoint)}")
    return None


def _trust_advice() -> str:
    """Return what to do so that the certificate of a service is trusted."""
    path = os.environ.get(TRUSTED)
    if not path:
        return f"name the file of its authority in {TRUSTED}"
    try:
        has_any = b"-----BEGIN" in Path(path).read_bytes()
    except OSError as error:
        return f"{TRUSTED} names {path}, which cannot be read ({error.strerror}): correct that"
    if not has_any:
        return f"{TRUSTED} names {path}, which has no certificate in PEM format: correct that"
    return f"add the certificate of its authority to {path}, which {TRUSTED} names"


def _no_service(endpoint: str) -> str:
    return (
        f"expected an object store at {endpoint}, found a page of HTML; check the endpoint, which "
        "may be that of a console or of a proxy"
    )


def _endpoint_variable() -> str | None:
    """Return the variable that gives the endpoint; None if the client finds it by itself."""
    return next((name for name in ENDPOINT_VARIABLES if name in os.environ), None)


def _endpoint_of_environment() -> str:
    """Return the endpoint that the environment gives, without its path and credentials."""
    name = _endpoint_variable()
    if name is None:
        return "the service's endpoint"
    parts = urlsplit(os.environ[name])
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def connect(url: str) -> ServiceBucket:
    """Return the client of the bucket of `url`, of the form scheme://bucket; nothing is requested.

    Raises:
        InvalidArgumentError: obstore is not installed, or refuses the environment's configuration.
    """
    scheme, _, bucket = url.partition("://")
    service = SERVICES[scheme]
    try:
        from obstore import store as stores
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise InvalidArgumentError(
            f"open {url}: expected the package obstore, which is not installed; "
            "pip install 'holdfast-checkpoint[buckets]'"
        ) from error

    if service is S3:
        _check_endpoint(url)
        _check_key_pair(url)
    # Read anew by each call, and never kept here.
    provider = profile_credentials(url, os.environ) if service is S3 else None

    def store(
        request_secs: int, retry: dict[str, object], pause_secs: int | None = None, **given: object
    ) -> Any:
        if provider is not None:
            given["credential_provider"] = provider
        options = {
            "connect_timeout": timedelta(seconds=CONNECT_SECS),
            "timeout": timedelta(seconds=request_secs),
            # Options given here replace those of the environment.
            "allow_http": os.environ.get(service.allow_http, "").lower() == "true",
        }
        if pause_secs is not None:
            options["read_timeout"] = timedelta(seconds=pause_secs)
        try:
            store_type: Any = getattr(stores, service.store)
            return store_type(bucket, client_options=options, retry_config=retry, **given)
        except (BaseError, ValueError) as error:
            reason = explanation(str(error))
            raise InvalidArgumentError(
                f"open {url}: the environment's configuration is refused: {reason}; see "
                "docs/buckets.md"
            ) from None

    once: dict[str, object] = {"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_SECS)}
    often: dict[str, object] = {
        "max_retries": PART_TRIES_MAX,
        "retry_timeout": timedelta(seconds=PART_RETRY_SECS),
        "backoff": {
            "init_backoff": timedelta(seconds=PART_PAUSE_SECS),
            "max_backoff": timedelta(seconds=PART_PAUSE_MAX_SECS),
            "base": 2,
        },
    }
    unsigned = {"unsigned_payload": True} if service is S3 and _leaves_parts_unsigned() else {}
    large = store(PART_SECS, often, **unsigned)
    reading = store(ANSWER_SECS, once, REQUEST_SECS)
    return ServiceBucket(url, service, store(REQUEST_SECS, once), large, reading)


def _leaves_parts_unsigned() -> bool:
    """Return whether the requests of parts have a signature that does not cover their bytes.

    The SHA-256 of the bytes is half of an upload's processor time. TLS covers them in transit, and
    their digests on every read (docs/decisions/0037-unsigned-parts.md).
    """
    if UNSIGNED_PAYLOAD in os.environ:
        # The client follows it.
        return False
    name = _endpoint_variable()
    return name is None or urlsplit(os.environ[name]).scheme == "https"


def _check_endpoint(url: str) -> None:
    """Check the endpoint in the environment: with some others the client ends in a panic.

    Raises:
        InvalidArgumentError: It is no URL, or has no encryption while that is not allowed.
    """
    name = _endpoint_variable()
    if name is None:
        return
    value = os.environ[name]
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        # What is before the last @ may be a secret.
        excerpt = repr(value.rpartition("@")[2][:MESSAGE_CHARS_MAX])
        raise InvalidArgumentError(
            f"open {url}: expected {name} to be https://HOST or http://HOST:PORT, found {excerpt}; "
            "set or remove it"
        )
    if parts.scheme == "http" and os.environ.get(S3.allow_http, "").lower() != "true":
        raise InvalidArgumentError(
            f"open {url}: {name} is an address without encryption, which needs {S3.allow_http}=true"
        )


def _check_key_pair(url: str) -> None:
    """Check that the environment has both halves of a key, or none.

    Raises:
        InvalidArgumentError: it has one.
    """
    missing = [name for name in KEY_PAIR if not os.environ.get(name)]
    if len(missing) == 1:
        (there,) = set(KEY_PAIR) - set(missing)
        raise InvalidArgumentError(
            f"open {url}: expected {KEY_PAIR[0]} and {KEY_PAIR[1]}, found {there} alone; set "
            f"{missing[0]} too, or remove {there}"
        )


def explanation(text: str) -> str:
    """Return the service's code and message in an error's text; else the text's first line."""
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    status = re.search(r"status code: (\d+ [A-Za-z ]*)", text)
    parts = [match[1].strip() for match in (status, code, message) if match is not None]
    if parts:
        return ", ".join(parts)[:MESSAGE_CHARS_MAX]
    text = re.sub(r"(https?://)(?:[^/\s@?]*@)?([^\s?)]*)(?:\?[^\s)]*)?", r"\1\2", text)
    causes = re.findall(r'(?:error|message|kind): "?([A-Za-z][^"{}(),]*)', text)
    first = text.strip().partition("\n")[0]
    return "; ".join(dict.fromkeys([first, *causes[-1:]]))[:MESSAGE_CHARS_MAX]
