"""Reads past the page cache: the same bytes, wherever they lie, and nothing left in the cache."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import StorageError
from holdfast.store.direct_io import (
    ALIGNMENT_BYTES,
    DIRECT_SIZE_MIN_BYTES,
    STAGING_SIZE_BYTES,
    DirectReader,
)
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LocalFileSystem
from holdfast.testing.store_bytes import content
from tests.store.failing_files import FailingFileSystem, FailurePlan, Fault
from tests.store.places import mounted, open_disk, open_disk_directly

KEY = "a/b"
SIZE = 3 * STAGING_SIZE_BYTES + 5
DATA = content(SIZE, 1)


class Watching(LocalFileSystem):
    """Records the bytes read per kind of descriptor, and can refuse direct reads."""

    def __init__(self, refusal: int | None = None) -> None:
        self.direct = self.plain = self.refused = 0
        self.refusal = refusal

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        is_direct = bool(_flags(fd) & os.O_DIRECT)
        if is_direct and self.refusal is not None:
            self.refused += 1
            raise OSError(self.refusal, os.strerror(self.refusal))
        count = super().read(fd, target, offset_bytes)
        if is_direct:
            self.direct += count
        else:
            self.plain += count
        return count


def _flags(fd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("flags:")), 8)


def _memory(size_bytes: int, before: int) -> memoryview:
    """Memory that begins `before` bytes behind a page's beginning."""
    return memoryview(mmap.mmap(-1, before + size_bytes))[before:]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    open_disk(tmp_path).put(KEY, DATA)
    with open_disk_directly(tmp_path).open(KEY) as reader:
        if not isinstance(reader, DirectReader):
            pytest.skip("the file system of the tests' folder takes no direct reads")
    return tmp_path


def _store(root: Path, files: LocalFileSystem) -> DiskStore:
    return DiskStore(root, SystemClock(), files, reads_directly=True)


@pytest.mark.parametrize("before", [0, 1, 64, ALIGNMENT_BYTES - 1])
@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, SIZE),
        (0, DIRECT_SIZE_MIN_BYTES),
        (ALIGNMENT_BYTES, SIZE - 5),
        (ALIGNMENT_BYTES, SIZE),
        (1, SIZE),
        (64, 64 + 2 * STAGING_SIZE_BYTES),
        (ALIGNMENT_BYTES - 1, SIZE - ALIGNMENT_BYTES),
        (SIZE - DIRECT_SIZE_MIN_BYTES - 3, SIZE),
    ],
)
def test_any_large_range_is_read_into_any_memory(
    root: Path, before: int, start: int, stop: int
) -> None:
    files = Watching()
    target = _memory(stop - start, before)
    with _store(root, files).open(KEY) as reader:
        reader.read_into(start, target)
    assert target == DATA[start:stop]
    # At most the end of it, which is no whole page.
    assert files.plain < ALIGNMENT_BYTES
    assert files.direct >= stop - start - ALIGNMENT_BYTES


def test_nothing_of_it_stays_in_the_page_cache(root: Path) -> None:
    def is_cached(key: str, *stores: DiskStore) -> bool:
        """Whether the object is in the page cache after these have read it; asking brings it in."""
        open_disk(root).put(key, DATA)
        for store in stores:
            with store.open(key) as reader:
                reader.read_into(0, _memory(SIZE, 0))
        fd = os.open(root / key, os.O_RDONLY)
        try:
            os.preadv(fd, [bytearray(1)], STAGING_SIZE_BYTES, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    if is_cached("a/new"):
        pytest.skip("the tests' folder lies in memory, or its file system writes through the cache")
    assert not is_cached("a/direct", open_disk_directly(root))
    assert is_cached("a/plain", open_disk(root))


def test_small_ranges_are_read_through_the_page_cache(root: Path) -> None:
    files = Watching()
    with _store(root, files).open(KEY) as reader:
        target = bytearray(DIRECT_SIZE_MIN_BYTES - 1)
        reader.read_into(7, memoryview(target))
    assert target == DATA[7 : 7 + len(target)]
    assert (files.direct, files.plain) == (0, len(target))


def test_small_objects_are_not_opened_twice(tmp_path: Path) -> None:
    store = open_disk_directly(tmp_path)
    store.put(KEY, bytes(10))
    with store.open(KEY) as reader:
        assert not isinstance(reader, DirectReader)
    assert not _open_below(tmp_path)


@pytest.mark.parametrize("before", [0, 1])
def test_where_direct_reads_are_refused_the_system_s_own_way_is_taken(
    root: Path, before: int
) -> None:
    files = Watching(refusal=errno.EINVAL)
    with _store(root, files).open(KEY) as reader:
        for _ in range(3):
            target = _memory(SIZE, before)
            reader.read_into(0, target)
            assert target == DATA
    # Direct reads are tried once, and not for every block.
    assert (files.refused, files.plain) == (1, 3 * SIZE)


def test_a_file_system_without_direct_reads_serves_all_the_same(tmp_path: Path) -> None:
    with mounted("ramfs", tmp_path / "ramfs") as folder:
        store = open_disk_directly(folder)
        store.put(KEY, DATA)
        target = _memory(SIZE, 0)
        with store.open(KEY) as reader:
            assert not isinstance(reader, DirectReader)
            reader.read_into(0, target)
        assert target == DATA


def test_a_failing_direct_read_is_told_as_any_other(root: Path) -> None:
    with (
        _store(root, Watching(refusal=errno.EIO)).open(KEY) as reader,
        pytest.raises(StorageError, match=r"read .*a/b: Input/output error .*check the storage"),
    ):
        reader.read_into(0, _memory(SIZE, 0))


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("taken", [1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1])
def test_reads_that_bring_less_than_was_asked_for_are_gone_on_with(
    root: Path, before: int, taken: int
) -> None:
    files = FailingFileSystem(FailurePlan(Fault(taken_bytes=taken), operations={"read"}))
    target = _memory(SIZE, before)
    with DiskStore(root, SystemClock(), files, reads_directly=True).open(KEY) as reader:
        reader.read_into(0, target)
    assert target == DATA


@pytest.mark.parametrize("before", [0, 1])
def test_an_object_that_ends_too_early_says_where(root: Path, before: int) -> None:
    with open_disk_directly(root).open(KEY) as reader:
        os.truncate(root / KEY, SIZE - 10_000)
        with pytest.raises(StorageError, match=f"up to {SIZE}, found its end at {SIZE - 10_000}"):
            reader.read_into(0, _memory(SIZE, before))


def test_what_is_open_is_read_though_its_name_is_gone(root: Path) -> None:
    store, target = open_disk_directly(root), _memory(SIZE, 0)
    with store.open(KEY) as reader:
        store.delete(KEY)
        reader.read_into(0, target)
    assert target == DATA
    assert not _open_below(root)


@pytest.mark.parametrize("leave", [lambda: None, lambda: 1 / 0])
def test_no_descriptor_stays_open(root: Path, leave: Callable[[], object]) -> None:
    try:
        with open_disk_directly(root).open(KEY) as reader:
            assert len(_open_below(root)) == 2
            reader.read_into(0, _memory(SIZE, 1))
            leave()
    except ZeroDivisionError:
        pass
    assert not _open_below(root)


def test_threads_read_one_object_at_once(root: Path) -> None:
    def read(number: int) -> bool:
        start, target = 1000 * number + 1, _memory(STAGING_SIZE_BYTES, number % 2)
        reader.read_into(start, target)
        return bytes(target) == DATA[start : start + len(target)]

    with open_disk_directly(root).open(KEY) as reader, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))


def _open_below(root: Path) -> list[str]:
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [path for path in opened if path.startswith(f"{root}/")]
