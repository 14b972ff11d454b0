"""Serve a disk with a volatile write cache: the data left by a cut of its power is known.

A process of its own serves one file through FUSE; a loop device on that file is the disk. Written
data stays in the cache until the disk is flushed. A cut keeps everything that was flushed and, of
later writes, a random choice: nothing, all, the first so many writes, or some of the sectors. Any
of these is legal: a disk promises no more for writes that were not flushed, and one sector is never
torn. The copy is of one moment because one thread does everything: the cut is taken before the next
request is handled.

Arguments: the image, the file to mount on, a folder for cuts. It prints `{"ready": true}`; takes
lines `{"seed": …, "cuts": …, "gap": …}`; then cuts after each 1 to `gap` further requests and
prints a line for each cut. It ends when its input does.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import select
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

SECTOR_SIZE_BYTES = 4096
WRITE_SIZE_BYTES_MAX = 128 * 1024
ZERO_RUN_SIZE_BYTES = 64 * 1024

# Linux's include/uapi/linux/fuse.h.
SETATTR, GETATTR, OPEN, READ, WRITE, STATFS = 4, 3, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, ACCESS, DESTROY = 18, 20, 25, 26, 34, 38
UNANSWERED = (2, 36, 42)  # forget, interrupt, batch of forgets
IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
READ_OR_WRITE = struct.Struct("<QQIIQII")
ATTRIBUTES = struct.Struct("<QII6Q3I7I")
MAX_PAGES, BIG_WRITES, DIRECT_IO = 1 << 22, 1 << 5, 1
MS_NOSUID, MS_NODEV, PR_SET_IO_FLUSHER = 2, 4, 57

libc = ctypes.CDLL(None, use_errno=True)


class Cuts:
    """When the power is cut, and what each cut leaves in the cache's place."""

    def __init__(self, seed: str, count: int, gap: int) -> None:
        self._chance = random.Random(seed)
        self._gap = gap
        self._left = count
        self._wait = 0
        self._next()

    def is_now(self) -> bool:
        """Whether the power is cut before this request; asked once for each."""
        self._wait -= 1
        if self._left == 0 or self._wait > 0:
            return False
        self._next()
        self._left -= 1
        return True

    def survivors(self, cache: list[tuple[int, bytes]]) -> tuple[str, list[tuple[int, bytes]]]:
        """What of the cache reached the disk: a word for how it was chosen, and the sectors."""
        sectors = [
            (offset + at, data[at : at + SECTOR_SIZE_BYTES])
            for offset, data in cache
            for at in range(0, len(data), SECTOR_SIZE_BYTES)
        ]
        how = self._chance.choice(["nothing", "all", "first", "some", "some"])
        if how == "nothing":
            return how, []
        if how == "first":
            return how, sectors[: self._chance.randint(0, len(sectors))]
        if how == "some":
            share = self._chance.random()
            return how, [sector for sector in sectors if self._chance.random() < share]
        return how, sectors

    def _next(self) -> None:
        self._wait = self._chance.randint(1, self._gap)


class Disk:
    """What is read, what is durable, and the writes in between, oldest first."""

    def __init__(self, image: Path, folder: Path) -> None:
        self._now = bytearray(image.read_bytes())
        self._durable = bytearray(self._now)
        self._cache: list[tuple[int, bytes]] = []
        self._folder = folder
        self._taken = 0
        self.requests = 0
        self.size_bytes = len(self._now)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._now[offset : offset + size])

    def write(self, offset: int, data: bytes) -> None:
        """Takes a write into the cache."""
        assert offset + len(data) <= self.size_bytes
        assert offset % SECTOR_SIZE_BYTES == len(data) % SECTOR_SIZE_BYTES == 0
        self._now[offset : offset + len(data)] = data
        self._cache.append((offset, data))

    def flush(self) -> None:
        """All that was written is durable from here on."""
        for offset, data in self._cache:
            self._durable[offset : offset + len(data)] = data
        self._cache.clear()

    def cut(self, cuts: Cuts) -> None:
        """Keep what the disk would hold if its power were cut now, and print the cut."""
        at = time.monotonic()
        how, sectors = cuts.survivors(self._cache)
        left = bytearray(self._durable)
        for offset, data in sectors:
            left[offset : offset + len(data)] = data
        self._taken += 1
        path = self._folder / f"cut-{self._taken:03d}.img"
        write_sparse(path, left)
        cached = sum(len(data) for _, data in self._cache) // SECTOR_SIZE_BYTES
        lost = cached - len(sectors)
        line = {"image": str(path), "time": at, "request": self.requests}
        print(json.dumps(line | {"kept": how, "cached": cached, "lost": lost}), flush=True)


def write_sparse(path: Path, data: bytearray) -> None:
    """Writes an image without its long runs of zeros."""
    zeros = bytes(ZERO_RUN_SIZE_BYTES)
    with path.open("wb") as file:
        file.truncate(len(data))
        for start in range(0, len(data), ZERO_RUN_SIZE_BYTES):
            run = data[start : start + ZERO_RUN_SIZE_BYTES]
            if run != zeros[: len(run)]:
                file.seek(start)
                file.write(run)


class Server:
    """Answers the kernel's requests to the one file; see Documentation/filesystems/fuse."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.cuts: Cuts | None = None
        self._calls: dict[int, Callable[[memoryview], bytes]] = {
            INIT: self._init,
            GETATTR: self._attributes,
            SETATTR: self._attributes,
            OPEN: lambda body: struct.pack("<QIi", 1, DIRECT_IO, 0),
            READ: self._read,
            WRITE: self._write,
            FSYNC: self._flush,
            STATFS: lambda body: bytes(80),
        } | dict.fromkeys((RELEASE, FLUSH, ACCESS, DESTROY), lambda body: b"")

    def answer(self, request: memoryview) -> bytes | None:
        """The reply to one request, None where the kernel wants none."""
        _, code, unique, *_ = IN_HEADER.unpack_from(request)
        if code in UNANSWERED:
            return None
        call = self._calls.get(code)
        if call is None:
            return OUT_HEADER.pack(OUT_HEADER.size, -errno.ENOSYS, unique)
        body = call(request[IN_HEADER.size :])
        return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique) + body

    def _init(self, body: memoryview) -> bytes:
        major, minor, ahead, flags = struct.unpack_from("<IIII", body)
        flags &= MAX_PAGES | BIG_WRITES
        pages = WRITE_SIZE_BYTES_MAX // 4096
        limits = (16, 12, WRITE_SIZE_BYTES_MAX, 1, pages, 0, 0, 0)
        return struct.pack("<IIIIHHIIHHII24x", major, min(minor, 38), ahead, flags, *limits)

    def _attributes(self, body: memoryview) -> bytes:
        size = self._disk.size_bytes
        mode = stat.S_IFREG | 0o600
        times = (0, 0, 0, 0, 0, 0)
        return ATTRIBUTES.pack(
            3600, 0, 0, 1, size, size // 512, *times, mode, 1, 0, 0, 0, SECTOR_SIZE_BYTES, 0
        )

    def _read(self, body: memoryview) -> bytes:
        _, offset, size, *_ = READ_OR_WRITE.unpack_from(body)
        return self._disk.read(offset, size)

    def _write(self, body: memoryview) -> bytes:
        self._count()
        _, offset, size, *_ = READ_OR_WRITE.unpack_from(body)
        data = bytes(body[READ_OR_WRITE.size : READ_OR_WRITE.size + size])
        self._disk.write(offset, data)
        return struct.pack("<II", size, 0)

    def _flush(self, body: memoryview) -> bytes:
        self._count()
        self._disk.flush()
        return b""

    def _count(self) -> None:
        self._disk.requests += 1
        if self.cuts is not None and self.cuts.is_now():
            self._disk.cut(self.cuts)


def mount(where: Path) -> int:
    """Mounts the file; returns the kernel's end, which ends the mount's life when it is closed."""
    # Memory that this process asks for is never freed by writing to the disk that it is.
    libc.prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0)
    kernel = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={kernel},rootmode={stat.S_IFREG | 0o600:o},user_id=0,group_id=0"
    arguments = (b"power-disk", bytes(where), b"fuse", MS_NOSUID | MS_NODEV, options.encode())
    if libc.mount(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(where))
    return kernel


def main() -> None:
    image, where, folder = map(Path, sys.argv[1:])
    server = Server(Disk(image, folder))
    kernel = mount(where)
    print(json.dumps({"ready": True}), flush=True)
    buffer = bytearray(WRITE_SIZE_BYTES_MAX + 64 * 1024)
    while True:
        ready, _, _ = select.select([kernel, sys.stdin], [], [])
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            told = json.loads(line)
            server.cuts = Cuts(told["seed"], told["cuts"], told["gap"])
        if kernel in ready:
            try:
                size = os.readv(kernel, [buffer])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return  # it was unmounted
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            reply = server.answer(memoryview(buffer)[:size])
            if reply is not None:
                os.write(kernel, reply)


if __name__ == "__main__":
    main()
