"""Define the HTTP interface between peers: targets, ranges, and two small JSON bodies.

    GET, HEAD /RUN_ID/objects/KEY       the bytes of one object, whole or one range of them
    GET       /RUN_ID/names/PREFIX      an `ObjectNames`
    GET       /RUN_ID/status/HOST       this agent's status; HOST's agent asks
    POST      /RUN_ID/messages/HOST     one message of the hosts' coordination, from HOST's agent

Neither end trusts the other one, so everything parsed here is matched whole or refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

import msgspec

from holdfast.errors import InvalidArgumentError
from holdfast.peers.address import PeerAddress, parse_address
from holdfast.store.contract import check_key

OBJECTS = "objects"
NAMES = "names"
MESSAGES = "messages"
STATUS = "status"
ADDRESS_HEADER = "Holdfast-Address"
"""The address of the agent that sends a message."""
HOSTS_HEADER = "Holdfast-Hosts"
"""The addresses of other hosts' agents that the sending agent knows."""
HOSTS_SIZE_MAX_BYTES = 4000
ATTEMPT_HEADER = "Holdfast-Attempt"
ERROR_HEADER = "Holdfast-Error"
"""The class of the error in a refusal; a header, because the answer to HEAD has no body."""
NAMES_SIZE_MAX_BYTES = 64 * 1024 * 1024

TOKEN_LENGTH_MIN = 32
_TOKEN = re.compile(r"[!-~]{32,256}")
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})")


class ObjectNames(msgspec.Struct, frozen=True):
    """(key, size in bytes) of each object below a prefix, in the order of the keys."""

    objects: tuple[tuple[str, int], ...]


class HttpRefusal(msgspec.Struct, frozen=True):
    """The reason why a request is refused."""

    message: str


def target_of(run_id: str, kind: str, key: str) -> str:
    """Return the request's target for an object, or for the names below a prefix.

    Raises:
        InvalidArgumentError: `key` is no valid key.
    """
    check_key(key)
    try:
        return f"/{run_id}/{kind}/{quote(key, safe='/')}"
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"key {key!r}: expected one that UTF-8 can encode") from error


def parse_target(target: str) -> tuple[str, str, str]:
    """Return (run id, kind, key) of a request's target, decoded once.

    Raises:
        InvalidArgumentError: it is no such target, or its key could lead outside of the store.
    """
    try:
        # Decoded once: a second decoding could turn escaped characters into a path.
        decoded = unquote(target, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"target {target[:200]!r}: it is not UTF-8") from error
    root, run_id, kind, key = (*decoded.split("/", 3), "", "", "", "")[:4]
    if root or kind not in (OBJECTS, NAMES, STATUS, MESSAGES):
        raise InvalidArgumentError(
            f"target {target[:200]!r}: expected /RUN_ID/{OBJECTS}/KEY, /RUN_ID/{NAMES}/PREFIX, "
            f"/RUN_ID/{STATUS}/HOST or /RUN_ID/{MESSAGES}/HOST"
        )
    return run_id, kind, check_key(key)


def hosts_text(addresses: Mapping[str, PeerAddress]) -> str:
    """Return the value of `HOSTS_HEADER` for these hosts, without the oldest if it is too long.

    Agents that started last come first: they are reached elsewhere than the others know.
    """
    newest_first = sorted(addresses.items(), key=lambda item: (-item[1].since, item[0]))
    pairs, size_bytes = [], 0
    for host, address in newest_first:
        pair = f"{quote(host, safe='')}={quote(str(address), safe='')}"
        size_bytes += len(pair) + 1
        if size_bytes > HOSTS_SIZE_MAX_BYTES:
            break
        pairs.append(pair)
    return ",".join(pairs)


def parse_hosts(header: str) -> dict[str, PeerAddress]:
    """Return the addresses in a text of `hosts_text`.

    Raises:
        InvalidArgumentError: it is no such text.
    """
    pairs = [pair.partition("=") for pair in header.split(",")] if header else []
    return {unquote(host): parse_address(unquote(address)) for host, _, address in pairs}


def parse_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the half-open range of a `Range` header; None if the object does not have it.

    Raises:
        InvalidArgumentError: it is not one range with both ends.
    """
    match = _RANGE.fullmatch(header)
    if match is None:
        raise InvalidArgumentError(f"range {header[:100]!r}: expected bytes=FIRST-LAST")
    start, stop = int(match[1]), int(match[2]) + 1
    return (start, stop) if start < stop <= size_bytes else None


def content_range(start: int, stop: int, size_bytes: int) -> str:
    """Return the `Content-Range` of a half-open range."""
    return f"bytes {start}-{stop - 1}/{size_bytes}"


def check_token(token: str, where: str) -> str:
    """Return `token` if it is valid: long enough, and fit for a header.

    Raises:
        InvalidArgumentError: it is not; the message does not contain it.
    """
    if _TOKEN.fullmatch(token) is None:
        raise InvalidArgumentError(
            f"{where}: expected a token of {TOKEN_LENGTH_MIN} to 256 visible ASCII characters, "
            f"found {len(token)} characters"
        )
    return token
