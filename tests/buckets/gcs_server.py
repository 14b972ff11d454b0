"""The XML requests of Google Cloud Storage, as far as Holdfast makes them, in memory.

No server of Google Cloud Storage that has them can be installed from a package index. Written
after cloud.google.com/storage/docs/xml-api.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.server
import itertools
import json
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "runs"


@dataclass
class _Object:
    data: bytes
    generation: int
    modified: float


@dataclass
class _Bucket:
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def put(self, name: str, data: bytes, generation: str | None) -> int | None:
        """The new generation; None where another one than the given one is there."""
        with self.lock:
            found = self.objects.get(name)
            if generation is not None and int(generation) != (found.generation if found else 0):
                return None
            made = next(self.generations)
            self.objects[name] = _Object(data, made, time.time())
            return made


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body in one packet.
    wbufsize = 1 << 16
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def _begin(self) -> tuple[str, dict[str, str], bytes]:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bucket, _, name = parts.path.lstrip("/").partition("/")
        self.is_known = unquote(bucket) == BUCKET
        return unquote(name), dict(parse_qsl(parts.query, keep_blank_values=True)), body

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}.</Message></Error>"
        self._answer(status, text.encode())

    def do_PUT(self) -> None:
        name, query, body = self._begin()
        if not self.is_known:
            self._refuse(404, "NoSuchBucket")
            return
        if "uploadId" in query:
            parts = self.server.bucket.uploads.get(query["uploadId"])
            if parts is None:
                self._refuse(404, "NoSuchUpload")
                return
            parts[int(query["partNumber"])] = body
            self._answer(200, ETag=f'"{len(body)}-{query["partNumber"]}"')
            return
        made = self.server.bucket.put(name, body, self.headers.get("x-goog-if-generation-match"))
        if made is None:
            self._refuse(412, "PreconditionFailed")
            return
        self._answer(200, ETag=f'"{made}"', x_goog_generation=str(made))

    def do_POST(self) -> None:
        name, query, body = self._begin()
        bucket = self.server.bucket
        if not self.is_known:
            self._refuse(404, "NoSuchBucket")
            return
        if "uploads" in query:
            upload = f"upload-{next(bucket.generations)}"
            bucket.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(name)}"
            text += f"</Key><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
            return
        parts = bucket.uploads.pop(query["uploadId"], None)
        if parts is None:
            self._refuse(404, "NoSuchUpload")
            return
        found = ElementTree.fromstring(body).iter()
        wanted = [int(one.text or 0) for one in found if _is(one, "PartNumber")]
        made = bucket.put(name, b"".join(parts[number] for number in wanted), None)
        text = f'<CompleteMultipartUploadResult><ETag>"{made}"</ETag>'
        text += "</CompleteMultipartUploadResult>"
        self._answer(200, text.encode(), x_goog_generation=str(made))

    def do_DELETE(self) -> None:
        name, query, _ = self._begin()
        bucket = self.server.bucket
        if "uploadId" in query:
            bucket.uploads.pop(query["uploadId"], None)
        elif bucket.objects.pop(name, None) is None:
            self._refuse(404, "NoSuchKey")
            return
        self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, query, _ = self._begin()
        if not self.is_known:
            self._refuse(404, "NoSuchBucket")
            return
        if not name:
            self._list(query)
            return
        found = self.server.bucket.objects.get(name)
        if found is None:
            self._refuse(404, "NoSuchKey")
            return
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted != f'"{found.generation}"':
            self._refuse(412, "PreconditionFailed")
            return
        headers = {
            "ETag": f'"{found.generation}"',
            "Last_Modified": email.utils.formatdate(found.modified, usegmt=True),
            "x_goog_generation": str(found.generation),
        }
        data, span = found.data, self.headers.get("Range")
        if self.command == "HEAD":
            self._answer(200, length=str(len(data)), **headers)
            return
        if span is None:
            self._answer(200, data, **headers)
            return
        start, stop = (int(x) for x in span.removeprefix("bytes=").split("-"))
        if start >= len(data):
            self._refuse(416, "InvalidRange")
            return
        piece = data[start : stop + 1]
        headers["Content_Range"] = f"bytes {start}-{start + len(piece) - 1}/{len(data)}"
        self._answer(206, piece, **headers)

    def _list(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after") or ""
        prefix, count = query.get("prefix", ""), int(query.get("max-keys", 1000))
        objects = self.server.bucket.objects
        names = sorted(n for n in list(objects) if n.startswith(prefix) and n > after)
        rows = []
        for name in names[:count]:
            found = objects.get(name)
            if found is not None:
                time_text = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
                rows.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(found.data)}</Size>"
                    f"<LastModified>{time_text}</LastModified>"
                    f'<ETag>"{found.generation}"</ETag></Contents>'
                )
        more = len(names) > count
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>"
        text += "".join(rows)
        if more:
            last = escape(names[count - 1])
            text += f"<NextContinuationToken>{last}</NextContinuationToken>"
        text += "</ListBucketResult>"
        self._answer(200, text.encode())


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket = _Bucket()


def _is(element: ElementTree.Element, name: str) -> bool:
    return element.tag.rpartition("}")[2] == name


@contextlib.contextmanager
def running_gcs(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a server that runs meanwhile, with one empty bucket."""
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, name="gcs")
        thread.start()
        account = folder / "account.json"
        account.write_text(
            json.dumps(
                {
                    "gcs_base_url": f"http://127.0.0.1:{server.server_port}",
                    "disable_oauth": True,
                    "client_email": "",
                    "private_key": "",
                    "private_key_id": "",
                }
            )
        )
        try:
            yield {"GOOGLE_SERVICE_ACCOUNT": str(account), "GOOGLE_ALLOW_HTTP": "true"}
        finally:
            server.shutdown()
            thread.join()
