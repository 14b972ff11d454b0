"""Ask other hosts' agents over HTTP: one GET each, all at once, with a bound on time and size."""

from __future__ import annotations

import asyncio
import os
import ssl

import aiohttp
import msgspec

from holdfast.coordination.messages import MESSAGE_BYTES_MAX
from holdfast.format.json_codec import decode
from holdfast.peers.address import PeerAddress
from holdfast.peers.directory import PeerDirectory
from holdfast.peers.tls import client_context
from holdfast.peers.wire import HttpRefusal, target_of

ANSWER_SECS = 3.0
CONNECTIONS_MAX = 256
REASON_CHARS_MAX = 300


def open_session(token: str, *, per_host_max: int = 0) -> aiohttp.ClientSession:
    """Return a session for requests to other agents.

    Args:
        token: The run's token.
        per_host_max: How many connections one agent gets; 0: any number.
    """
    connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX, limit_per_host=per_host_max)
    headers = {"Authorization": f"Bearer {token}"}
    return aiohttp.ClientSession(connector=connector, headers=headers)


def url_of(address: PeerAddress, target: str, tls: ssl.SSLContext | None) -> str:
    """Return the URL of a target of the agent at `address`."""
    scheme = "https" if tls is not None else "http"
    return f"{scheme}://{address.authority}{target}"


async def ask_all(peers: PeerDirectory, kind: str, own_host: str) -> dict[str, bytes | str]:
    """Ask the agents of all known hosts for `kind`; takes at most `ANSWER_SECS`.

    Returns:
        By host, the answer of its agent, or the reason why there is none; empty without peers.
    """
    addresses = peers.addresses()
    if not addresses or peers.token is None:
        return {}
    tls = client_context(peers.tls) if peers.tls is not None else None
    target = target_of(peers.run_id, kind, own_host)
    async with open_session(peers.token) as session:
        tasks = {
            host: asyncio.create_task(_ask(session, url_of(address, target, tls), tls))
            for host, address in addresses.items()
        }
        await asyncio.wait(tasks.values(), timeout=ANSWER_SECS)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    silent = f"no answer within {ANSWER_SECS:.0f} s"
    return {host: silent if task.cancelled() else task.result() for host, task in tasks.items()}


async def _ask(session: aiohttp.ClientSession, url: str, tls: ssl.SSLContext | None) -> bytes | str:
    try:
        async with session.get(url, ssl=tls or True) as answer:
            data = bytearray()
            async for piece in answer.content.iter_chunked(1 << 16):
                data += piece
                # Checked while the answer arrives: a faulty peer may send without end.
                if len(data) > MESSAGE_BYTES_MAX:
                    return f"its answer is larger than {MESSAGE_BYTES_MAX} bytes"
            return bytes(data) if answer.status == 200 else _refusal(answer.status, bytes(data))
    except aiohttp.ClientConnectorError as error:
        return f"not reached: {os.strerror(error.errno) if error.errno else error}"
    except (aiohttp.ClientError, OSError) as error:
        return f"the connection failed: {error or type(error).__name__}"[:REASON_CHARS_MAX]


def _refusal(status: int, data: bytes) -> str:
    try:
        reason = decode(data, HttpRefusal).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        reason = repr(data[:100])
    return f"it refuses (status {status}): {reason}"[:REASON_CHARS_MAX]
