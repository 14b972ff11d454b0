"""The part of the store suite about the bytes of objects: atomic writes and correct reads.

A separate class only because of its length; subclass `holdfast.testing.store_suite.StoreSuite`.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, StorageError
from holdfast.format.digests import Buffer
from holdfast.store.contract import Store
from holdfast.store.direct_io import ALIGNMENT_BYTES as ALIGNMENT
from holdfast.store.disk import FIRST_SIZE_BYTES, PIECE_SIZE_BYTES, STAGING_SIZE_BYTES
from holdfast.testing.block_source import BlockSource, SourceFailedError, fail

STAGING = STAGING_SIZE_BYTES
SIZES = [
    *(0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT),
    *(STAGING - 1, STAGING, STAGING + 1, STAGING + ALIGNMENT, 2 * STAGING + 5),
]


def content(size_bytes: int, seed: int) -> bytes:
    """Return bytes that differ at each position, and for each seed."""
    # An odd period, so that no piece equals its neighbour.
    period = random.Random(seed).randbytes(65_537)
    return (period * (size_bytes // len(period) + 1))[:size_bytes]


def read_all(store: Store, key: str) -> bytes:
    """Return all bytes of an object, read through `open`."""
    with store.open(key) as reader:
        data = bytearray(reader.size_bytes)
        reader.read_into(0, memoryview(data))
    return bytes(data)


def _aligned(data: bytes) -> memoryview:
    """Return the same bytes in page-aligned memory."""
    if not data:
        return memoryview(bytearray())
    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return memoryview(pages)


def _unaligned(data: bytes) -> memoryview:
    """Return the same bytes in memory at an odd address."""
    return memoryview(_aligned(b"\0" + data))[1:]


def _in_pieces(data: memoryview, *sizes: int) -> list[memoryview]:
    """Return `data` in pieces of these sizes, repeated cyclically."""
    pieces, start, turn = [], 0, 0
    while start < len(data):
        pieces.append(data[start : start + sizes[turn % len(sizes)]])
        start, turn = start + len(pieces[-1]), turn + 1
    return pieces


CUTS: dict[str, Callable[[bytes], list[Buffer]]] = {
    "one block": lambda data: [data],
    "aligned": lambda data: [_aligned(data)],
    "unaligned": lambda data: [_unaligned(data)],
    "read-only": lambda data: [_aligned(data).toreadonly()],
    "aligned pieces": lambda data: [*_in_pieces(_aligned(data), STAGING // 2)],
    "ragged pieces": lambda data: [*_in_pieces(_aligned(data), 1, ALIGNMENT, STAGING + 1, 4095)],
    "unaligned, then aligned": lambda data: [data[:7], _aligned(data[7:])],
    "empty ones between": lambda data: [b"", data[:9], b"", bytearray(), data[9:], b""],
    "a map itself": lambda data: [_mapped(data)] if data else [],
}


def _mapped(data: bytes) -> mmap.mmap:
    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return pages


class StoreBytesSuite:
    """Tests of single objects; see the module."""

    key_suffix: ClassVar[str] = ""
    """A suffix for every key, for a store that treats some keys differently."""
    readers_outlast_keys: ClassVar[bool] = True
    """Whether an open reader still reads once its key is deleted or replaced."""

    def key(self, name: str) -> str:
        """Return the key for `name`."""
        return name + self.key_suffix

    @pytest.fixture
    def opener(self) -> Callable[[], Store]:
        """Return a picklable function that opens the test's store, which is empty at first."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, opener: Callable[[], Store]) -> Store:
        """Return the store under test; override this for a store that must be closed."""
        return opener()

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_put_is_read_whatever_its_size_and_its_blocks(
        self, store: Store, size: int
    ) -> None:
        key = self.key("a/b")
        for number, (name, cut) in enumerate(CUTS.items()):
            data = content(size, number)
            store.put(key, BlockSource(cut(data)))
            assert store.get(key) == data, name
            assert read_all(store, key) == data, name

    @pytest.mark.parametrize("is_lasting", [True, False])
    def test_every_byte_of_a_large_source_arrives(self, store: Store, is_lasting: bool) -> None:
        data = content(FIRST_SIZE_BYTES + PIECE_SIZE_BYTES + 5, 1)
        has_ended = threading.Event()
        source = BlockSource(
            _in_pieces(memoryview(data), 3 * STAGING, 10_000),
            is_lasting=is_lasting,
            on_end=has_ended.set,
        )
        store.put(self.key("a"), source)
        assert read_all(store, self.key("a")) == data
        # Callers that digest blocks as they pass rely on this.
        assert has_ended.is_set()

    def test_an_object_is_seen_by_nobody_before_put_returns(
        self, store: Store, opener: Callable[[], Store]
    ) -> None:
        other, key = opener(), self.key("a/b")
        seen = []

        def look(offset_bytes: int) -> None:
            with pytest.raises(ObjectNotFoundError):
                other.get(key)
            with pytest.raises(ObjectNotFoundError), other.open(key):
                pass
            assert list(other.list("a")) == []
            seen.append(offset_bytes)

        store.put(key, BlockSource([bytes(ALIGNMENT)] * 3, on_block=look))
        assert seen == [0, ALIGNMENT, 2 * ALIGNMENT]
        assert len(other.get(key)) == 3 * ALIGNMENT

    def test_the_old_object_is_seen_until_the_new_one_is_whole(
        self, store: Store, opener: Callable[[], Store]
    ) -> None:
        other, key, old = opener(), self.key("a/b"), content(5000, 0)
        store.put(key, old)
        for number, size in enumerate([5000, 100, 9000, 5000], 1):
            new = content(size, number)

            def look(offset_bytes: int, old: bytes = old) -> None:
                assert other.get(key) == read_all(other, key) == old
                assert [s.size_bytes for s in other.list("a")] == [len(old)]

            store.put(key, BlockSource([new[: size // 2], new[size // 2 :]], on_block=look))
            old = new
            assert other.get(key) == read_all(other, key) == old

    @pytest.mark.parametrize("at_bytes", [0, ALIGNMENT + 1, FIRST_SIZE_BYTES])
    def test_a_put_whose_source_fails_leaves_what_was_there(
        self, store: Store, at_bytes: int
    ) -> None:
        def fail_there(offset_bytes: int) -> None:
            if offset_bytes >= at_bytes:
                fail(offset_bytes)

        old, new = self.key("a/old"), self.key("a/new")
        store.put(old, b"old")
        pieces = [bytes(ALIGNMENT + 1)] * 2 + [bytes(FIRST_SIZE_BYTES)] * 2
        for key in (old, new):
            with pytest.raises(SourceFailedError):
                store.put(key, BlockSource(pieces, on_block=fail_there))
        assert [s.key for s in store.list("a")] == [old]
        assert store.get(old) == b"old"

    @pytest.mark.parametrize(
        ("size", "given"),
        [
            *((0, 1), (1, 0), (10, 9), (10, 11), (ALIGNMENT, ALIGNMENT + 1), (ALIGNMENT, 1)),
            *((STAGING + 1, STAGING), (STAGING, 2 * STAGING)),
        ],
    )
    def test_a_source_of_another_size_is_refused_and_leaves_what_was_there(
        self, store: Store, size: int, given: int
    ) -> None:
        old, new = self.key("a/old"), self.key("a/new")
        store.put(old, b"old")
        for key in (old, new):
            with pytest.raises(InvalidArgumentError):
                store.put(key, BlockSource([bytes(given)], size_bytes=size))
        assert [s.key for s in store.list("a")] == [old]
        assert store.get(old) == b"old"

    def test_ranges_are_read_as_they_are(self, store: Store) -> None:
        data, chance = content(100_000, 3), random.Random(4)
        store.put(self.key("a"), data)
        with store.open(self.key("a")) as reader:
            assert reader.size_bytes == len(data)
            ranges = [(0, 0), (0, 1), (0, len(data)), (len(data), len(data)), (4095, 4097)]
            ranges += [sorted(chance.choices(range(len(data) + 1), k=2)) for _ in range(50)]  # type: ignore[misc]
            for start, stop in ranges:
                target = bytearray(stop - start)
                reader.read_into(start, memoryview(target))
                assert target == data[start:stop]

    @pytest.mark.parametrize(("start", "count"), [(0, 101), (99, 2), (100, 1), (101, 1), (5000, 9)])
    def test_a_range_past_the_end_is_an_error(self, store: Store, start: int, count: int) -> None:
        store.put(self.key("a"), bytes(100))
        with store.open(self.key("a")) as reader, pytest.raises(StorageError):
            reader.read_into(start, memoryview(bytearray(count)))

    def test_threads_may_share_a_reader(self, store: Store) -> None:
        data = content(200_000, 5)
        store.put(self.key("a"), data)
        barrier = threading.Barrier(8, timeout=60)

        def read(number: int) -> bool:
            barrier.wait()
            chance, right = random.Random(number), True
            for _ in range(100):
                start = chance.randrange(len(data) - 1000)
                target = bytearray(1000)
                reader.read_into(start, memoryview(target))
                right &= target == data[start : start + 1000]
            return right

        with store.open(self.key("a")) as reader, ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(8)))

    @pytest.mark.parametrize("size", [100, STAGING + 1])
    def test_an_open_reader_keeps_its_bytes_whatever_happens_to_the_key(
        self, store: Store, size: int
    ) -> None:
        key = self.key("a/b")
        contents = [content(size, number) for number in range(4)]
        store.put(key, contents[0])
        with store.open(key) as first:
            store.put(key, contents[1])
            with store.open(key) as second:
                store.delete(key)
                # These two might be written to slots that are free now.
                store.put(key, contents[2])
                store.put(self.key("a/c"), contents[3])
                for reader, expected in ((first, contents[0]), (second, contents[1])):
                    target = bytearray(size)
                    if self.readers_outlast_keys:
                        reader.read_into(0, memoryview(target))
                        assert target == expected
                    else:
                        with pytest.raises(StorageError):
                            reader.read_into(0, memoryview(target))
        assert store.get(key) == contents[2]
        assert store.get(self.key("a/c")) == contents[3]
