"""HTTP/1.1 as the agent's Unix socket uses it: one POST, one answer, both with a length.

Pure functions, used by the agent's server and by its clients. Only the parts of HTTP that
`http.client`, `curl` and these clients send are understood; everything else is refused, so that
both ends always agree where a message ends. `docs/decisions/0024` says why no library does this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD_END = b"\r\n\r\n"
HEAD_SIZE_MAX_BYTES = 16 * 1024
BODY_SIZE_MAX_BYTES = 64 * 1024 * 1024

_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
}
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}"
_REQUEST = re.compile(rb"(" + _TOKEN + rb") /([!-~]{0,200}) HTTP/1\.([01])")
_ANSWER = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [ -~]{0,200}")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_LENGTH = re.compile(rb"[0-9]{1,18}")


class HttpFormatError(Exception):
    """The bytes are no message of this format; the connection cannot be used any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request line and its header. `name` is the target without the leading slash."""

    method: str
    name: str
    size_bytes: int
    keeps_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """A status line and its header."""

    status: int
    size_bytes: int
    keeps_open: bool


def request(name: str, body: bytes) -> bytes:
    """Return the bytes of a POST request."""
    return b"POST /%b HTTP/1.1\r\nHost: agent\r\nContent-Length: %d\r\n\r\n%b" % (
        name.encode("ascii"),
        len(body),
        body,
    )


def answer(status: int, body: bytes, *, keeps_open: bool = True) -> bytes:
    """Return the bytes of an answer."""
    return b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status,
        _REASONS[status].encode("ascii"),
        len(body),
        b"" if keeps_open else b"Connection: close\r\n",
        body,
    )


def parse_request(head: bytes) -> RequestHead:
    """Parse a request up to and without its `HEAD_END`.

    Raises:
        HttpFormatError: it is no such request, or its body is larger than any message.
    """
    line, fields = _split(head)
    match = _REQUEST.fullmatch(line)
    if match is None:
        raise HttpFormatError(f"expected a request line, found {line[:80]!r}")
    return RequestHead(
        method=match[1].decode("ascii"),
        name=match[2].decode("ascii"),
        size_bytes=_size_bytes(fields),
        # HTTP/1.0 closes unless asked not to, which no client here does.
        keeps_open=match[3] == b"1" and fields.get(b"connection", b"").lower() != b"close",
    )


def parse_answer(head: bytes) -> AnswerHead:
    """Parse an answer up to and without its `HEAD_END`.

    Raises:
        HttpFormatError: it is no such answer.
    """
    line, fields = _split(head)
    match = _ANSWER.fullmatch(line)
    if match is None:
        raise HttpFormatError(f"expected a status line, found {line[:80]!r}")
    return AnswerHead(
        status=int(match[1]),
        size_bytes=_size_bytes(fields),
        keeps_open=fields.get(b"connection", b"").lower() != b"close",
    )


def _split(head: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    line, *rest = head.split(b"\r\n")
    fields: dict[bytes, bytes] = {}
    for text in rest:
        match = _FIELD.fullmatch(text)
        if match is None:
            raise HttpFormatError(f"expected a header field, found {text[:80]!r}")
        name = match[1].lower()
        # Two lengths, or a length and chunks, are how two parsers are made to disagree.
        if name == b"transfer-encoding" or (name == b"content-length" and name in fields):
            raise HttpFormatError("expected one Content-Length and no Transfer-Encoding")
        fields[name] = match[2].rstrip(b" \t")
    return line, fields


def _size_bytes(fields: dict[bytes, bytes]) -> int:
    text = fields.get(b"content-length", b"0")
    if not _LENGTH.fullmatch(text) or int(text) > BODY_SIZE_MAX_BYTES:
        raise HttpFormatError(
            f"expected a length of at most {BODY_SIZE_MAX_BYTES} bytes, found {text[:40]!r}"
        )
    return int(text)
