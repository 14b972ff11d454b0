"""Ask other hosts' agents to upload their parts, and follow them until they have ended.

A host that does not answer, fails, or makes no progress for `STALL_SECS` is given up for this
round: the leader uploads its parts, which are in the shared durable tier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from holdfast.agent.part_uploads import UploadOrder, UploadReport
from holdfast.coordination.rank_runs import ranks_in
from holdfast.format.json_codec import decode
from holdfast.peers.directory import PeerDirectory
from holdfast.peers.tls import client_context
from holdfast.peers.wire import UPLOADS, target_of

if TYPE_CHECKING:
    import aiohttp

POLL_SECS = 0.5
ANSWER_SECS = 10.0
STALL_SECS = 120.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024

log = logging.getLogger(__name__)

Asked = tuple[frozenset[int], int]
"""The ranks whose parts a host has uploaded, and the bytes that it has written."""


async def ask_all(
    peers: PeerDirectory,
    own_host: str,
    orders: Mapping[str, UploadOrder],
    on_progress: Callable[[str, int], None],
) -> dict[str, Asked]:
    """Ask hosts to upload parts, and wait until each has ended or is given up.

    Args:
        peers: the addresses of the hosts.
        own_host: the asking host.
        orders: what each host is to upload.
        on_progress: called with a host and the number of its parts that are there.
    """
    if not orders or peers.token is None:
        return {}
    import aiohttp

    headers = {"Authorization": f"Bearer {peers.token}"}
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        asked = (
            _follow(session, peers, own_host, host, order, on_progress)
            for host, order in orders.items()
        )
        return dict(zip(orders, await asyncio.gather(*asked), strict=True))


async def _follow(
    session: aiohttp.ClientSession,
    peers: PeerDirectory,
    own_host: str,
    host: str,
    order: UploadOrder,
    on_progress: Callable[[str, int], None],
) -> Asked:
    wanted, loop = frozenset(ranks_in(order.ranks)), asyncio.get_running_loop()
    done, written_bytes, moved_secs = frozenset[int](), 0, loop.time()
    while loop.time() - moved_secs < STALL_SECS:
        try:
            report = await _ask(session, peers, own_host, host, order)
        except (TimeoutError, OSError, ValueError) as error:
            log.info("host %s uploads no parts of step %d: %s", host, order.id.step, error)
            break
        found = wanted.intersection(report.done)
        if (len(found), report.written_bytes) != (len(done), written_bytes):
            moved_secs = loop.time()
        done, written_bytes = found, report.written_bytes
        on_progress(host, len(done))
        if done == wanted:
            break
        if report.problem:
            log.info("host %s cannot upload step %d: %s", host, order.id.step, report.problem)
            break
        await asyncio.sleep(POLL_SECS)
    return done, written_bytes


async def _ask(
    session: aiohttp.ClientSession,
    peers: PeerDirectory,
    own_host: str,
    host: str,
    order: UploadOrder,
) -> UploadReport:
    """Return a host's report.

    Raises:
        OSError, ValueError: it does not answer, or refuses.
    """
    address = peers.addresses().get(host)
    if address is None:
        raise ValueError("its address is not known")
    tls = client_context(peers.tls) if peers.tls is not None else None
    scheme = "https" if tls is not None else "http"
    url = f"{scheme}://{address.authority}{target_of(peers.run_id, UPLOADS, own_host)}"
    import aiohttp

    try:
        async with session.post(url, data=msgspec.json.encode(order), ssl=tls or True) as answer:
            data = bytearray()
            async for piece in answer.content.iter_chunked(1 << 16):
                data += piece
                # Checked while the answer arrives: a faulty peer may send without end.
                if len(data) > ANSWER_BYTES_MAX:
                    raise ValueError(f"its answer is larger than {ANSWER_BYTES_MAX} bytes")
            if answer.status != 200:
                raise ValueError(f"it refuses (status {answer.status}): {bytes(data[:200])!r}")
            return decode(bytes(data), UploadReport)
    except aiohttp.ClientError as error:
        raise OSError(str(error) or type(error).__name__) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"its answer cannot be decoded: {error}") from error
