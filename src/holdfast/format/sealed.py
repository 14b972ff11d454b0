"""Sealed JSON: a record that contains its own digest, so that every flipped bit is detected.

The file is one JSON object whose last member is `"digest"`. The digest is taken over all bytes
before `,"digest":"`; the file ends with the digest, `"}` and a newline, and nothing else.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.errors import CheckpointDamagedError, NewerFormatError
from holdfast.format.digests import DIGEST_HEX_LENGTH, digest
from holdfast.format.json_codec import decode

FORMAT_VERSION = 1
RECORD_SIZE_MAX_BYTES = 1 << 30

_MARK = b',"digest":"'
_TAIL_LENGTH = len(_MARK) + DIGEST_HEX_LENGTH + len(b'"}\n')

T = TypeVar("T")


class _Version(msgspec.Struct):
    format_version: int


def seal(record: msgspec.Struct) -> bytes:
    """Return the bytes of `record` with its digest; `record` has at least one field."""
    body = msgspec.json.encode(record)[:-1]
    return body + _MARK + digest(body).encode() + b'"}\n'


def record_digest(data: bytes) -> str:
    """Return the digest by which other records refer to a sealed record: over all its bytes."""
    return digest(data)


def is_sealed(data: bytes) -> bool:
    """Return whether `data` ends with its digest, so that they are the bytes that were written."""
    tail = data[-_TAIL_LENGTH:]
    return tail.startswith(_MARK) and tail[len(_MARK) : -3] == digest(data[:-_TAIL_LENGTH]).encode()


def unseal(data: bytes, kind: type[T], name: str) -> T:
    """Return the record in `data`.

    Args:
        data: all bytes of the file.
        kind: the expected struct; it has a field `format_version`.
        name: the name of the file, for messages.

    Raises:
        CheckpointDamagedError: the bytes are not the ones that were written.
        NewerFormatError: the record is intact, but has a later format version.
    """
    body, tail = data[:-_TAIL_LENGTH], data[-_TAIL_LENGTH:]
    if len(data) > RECORD_SIZE_MAX_BYTES or not tail.startswith(_MARK) or tail[-3:] != b'"}\n':
        raise CheckpointDamagedError(
            f"read {name}: expected a JSON record that ends with its digest, found {len(data)} "
            f"bytes that end with {data[-24:]!r}; the file is truncated or was not written by "
            "Holdfast"
        )
    actual = digest(body)
    expected = tail[len(_MARK) : -3].decode("ascii", "replace")
    if actual != expected:
        raise CheckpointDamagedError(
            f"read {name}: digest of bytes [0, {len(body)}) expected {expected}, found {actual}; "
            "the file was changed after it was written"
        )
    try:
        # msgspec skips unknown members without checking that they are UTF-8.
        if not body.isascii():
            body.decode()
        version = decode(body + b"}", _Version).format_version
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"read {name}: it has format version {version}, this Holdfast reads versions up to "
                f"{FORMAT_VERSION}; upgrade Holdfast"
            )
        if version < 1:
            raise CheckpointDamagedError(f"read {name}: invalid format version {version}")
        return decode(body + b"}", kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"read {name}: not a record of its kind: {error}") from error
