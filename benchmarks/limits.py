"""What the machine can do: the rates that a checkpointer is measured against, in bytes a second."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PIECE_SIZE_BYTES = 8 * 1024 * 1024
ROUNDS = 3


def rates(size_bytes: int, disk: Path, ram: Path) -> dict[str, float]:
    """Medians of a few rounds each; `disk` and `ram` are folders there."""
    size = -(-size_bytes // PIECE_SIZE_BYTES) * PIECE_SIZE_BYTES
    source = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    source[:] = 1
    slot = _mapped_file(ram / "limits", size)
    found = {
        "copy_recycled": _rate(size, lambda: np.copyto(slot, source)),
        "copy_fresh": _rate(size, lambda: source.copy()),
        "write": _rate(size, lambda: _write(disk / "limits", source)),
    }
    found["read_cold"] = _rate(size, lambda: _read(disk / "limits", size), _drop_caches)
    (disk / "limits").unlink()
    (ram / "limits").unlink()
    return found


def new_pages_core_secs(size_bytes: int, ram: Path) -> float:
    """Processor seconds to reserve and map memory of a new file on a tmpfs."""
    before = time.process_time()
    pages = _mapped_file(ram / "limits", size_bytes)
    secs = time.process_time() - before
    del pages
    (ram / "limits").unlink()
    return secs


def _rate(size: int, call: Callable[[], object], before: Callable[[], object] = int) -> float:
    secs = []
    for _ in range(ROUNDS):
        before()
        started = time.perf_counter()
        call()
        secs.append(time.perf_counter() - started)
    return size / statistics.median(secs)


def _mapped_file(path: Path, size: int) -> np.ndarray:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.posix_fallocate(fd, 0, size)
    pages = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(fd)
    return np.frombuffer(pages, np.uint8)


def _write(path: Path, source: np.ndarray) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        for start in range(0, len(source), PIECE_SIZE_BYTES):
            os.write(fd, source[start : start + PIECE_SIZE_BYTES].data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, size: int) -> None:
    """Reads past the page cache into pages that are there already."""
    pages = memoryview(mmap.mmap(-1, PIECE_SIZE_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for start in range(0, size, PIECE_SIZE_BYTES):
            os.preadv(fd, [pages], start)
    finally:
        os.close(fd)


def _drop_caches() -> None:
    drop_caches()


def drop_caches() -> bool:
    """Empties the page cache, as root; whether it could."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
