"""Pulling an image out of another process's RAM, beside one plain socket on the same machine."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.commit import parse_part
from holdfast.engine.saving.part import PartPlan
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.saving.part_writer import write_part
from holdfast.engine.transfer.fetch import fetch_part
from holdfast.format.layout import image_layout
from holdfast.format.names import CHECKPOINTS, AttemptId, CheckpointId, image_key, part_key
from holdfast.format.records import ArraySpec, CheckpointSpec
from holdfast.peers.address import PeerAddress
from holdfast.peers.client import PeerAccess
from holdfast.peers.config import LOOPBACK, listen
from holdfast.peers.server import PeerServer, ServedRun
from holdfast.peers.store import PeerStore
from holdfast.store.ram import RamStore
from holdfast.store.slots import SlotPool

RUN_ID = "bench"
TOKEN = "0123456789abcdef" * 2
ARRAY_SIZE_BYTES = 50_000_000
WAIT_SECS = 120.0
ID = CheckpointId(1, AttemptId.of_start(1, "benchmark"))


def pull(*, folder: str, size_gb: float, count: int) -> dict[str, Any]:
    """Seconds of `count` pulls, and of as many plain transfers of the same bytes, taking turns."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_serve, args=(f"{folder}/theirs", size_gb, theirs), daemon=True)
    other.start()
    try:
        if not ours.poll(WAIT_SECS):
            raise TimeoutError("the process that serves said nothing")
        port, plain_port = ours.recv()
        return _measure(port, plain_port, Path(folder) / "own", count)
    finally:
        other.kill()
        other.join()


def _measure(port: int, plain_port: int, root: Path, count: int) -> dict[str, Any]:
    own = _ram(root)
    access = PeerAccess(address=PeerAddress(LOOPBACK, port), run_id=RUN_ID, token=TOKEN)
    peer = PeerStore(access, SystemClock())
    key = part_key(ID, 0, 1)
    part = parse_part(peer.get(key), key, ID, 0, 1)
    assert part.checkpoint is not None
    slot = _mapped(root / "plain", part.image_size_bytes)
    pulled, plain = [], []
    # The first of each finds pages that nobody used yet, and does not count.
    for _ in range(count + 1):
        started = time.perf_counter()
        fetch_part(peer, own, part, PartLayouts(part.checkpoint.arrays))
        pulled.append(time.perf_counter() - started)
        for stored in list(own.list(CHECKPOINTS)):
            own.delete(stored.key)
        started = time.perf_counter()
        _receive(plain_port, slot)
        plain.append(time.perf_counter() - started)
    peer.close()
    own.close()
    return {"size_bytes": part.image_size_bytes, "pulled_secs": pulled[1:], "plain_secs": plain[1:]}


def _receive(port: int, slot: mmap.mmap) -> None:
    with socket.create_connection((LOOPBACK, port)) as connection, memoryview(slot) as left:
        while len(left):
            left = left[connection.recv_into(left) :]


def _mapped(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, size)
    pages = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(fd)
    return pages


def _serve(folder: str, size_gb: float, pipe: Connection) -> None:
    """The other process: an image in RAM, served to peers and, by `sendfile`, to all who come."""
    root = Path(folder)
    store = _ram(root)
    count = max(1, round(size_gb * 1e9 / ARRAY_SIZE_BYTES))
    plan = _plan(count)
    array = np.random.default_rng(0).integers(0, 255, ARRAY_SIZE_BYTES, np.uint8)
    part = write_part(store, plan, lambda chunk: array.data)
    server = PeerServer(
        ServedRun(store=_ram(root), run_id=RUN_ID, token=TOKEN), listen(LOOPBACK, 0)
    )
    listener = socket.create_server((LOOPBACK, 0))
    pipe.send((server.address.port, listener.getsockname()[1]))
    with open(root / image_key(ID, 0, 1), "rb") as image:
        while True:
            connection, _ = listener.accept()
            with connection:
                done = 0
                while done < part.image_size_bytes:
                    left = part.image_size_bytes - done
                    done += os.sendfile(connection.fileno(), image.fileno(), done, left)


def _plan(count: int) -> PartPlan:
    arrays = tuple(
        ArraySpec(
            path=(f"w{number}",),
            shape=(ARRAY_SIZE_BYTES,),
            dtype="uint8",
            chunk_shape=(ARRAY_SIZE_BYTES,),
            owners=((0, 1),),
        )
        for number in range(count)
    )
    spec = CheckpointSpec(
        time=SystemClock().now(),
        metrics=None,
        arrays=arrays,
        containers=(),
        values=(),
        process_values=(),
    )
    return PartPlan(
        run_id=RUN_ID,
        id=ID,
        rank=0,
        part_count=1,
        layout=image_layout(arrays, 0),
        spec=spec,
        process_values=(),
    )


def _ram(root: Path) -> RamStore:
    root.mkdir(parents=True, exist_ok=True)
    return RamStore(root, SlotPool(root, None, SystemClock()).reserve, SystemClock())
