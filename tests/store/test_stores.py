"""Every store passes the suite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.store.contract import Store
from holdfast.store.ram import RamStore
from holdfast.testing.store_suite import StoreSuite
from tests.buckets.object_server import ObjectServer, open_bucket, serve, troubles
from tests.store.places import linkless, mounted, open_disk, open_disk_directly, open_ram


class TestDisk(StoreSuite):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return functools.partial(open_disk, tmp_path / "run")


class TestDiskReadDirectly(StoreSuite):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return functools.partial(open_disk_directly, tmp_path / "run")


class TestDiskOnTmpfs(StoreSuite):
    @pytest.fixture
    def opener(self, in_memory: Path) -> Callable[[], Store]:
        return functools.partial(open_disk, in_memory / "run")


class TestDiskWithoutDirectWrites(StoreSuite):
    """A ramfs refuses O_DIRECT."""

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Iterator[Callable[[], Store]]:
        with mounted("ramfs", tmp_path / "ramfs") as folder:
            yield functools.partial(open_disk, folder / "run")


class TestDiskWithoutLinks(StoreSuite):
    """A FUSE mount that refuses hard links, and renames with a flag."""

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Iterator[Callable[[], Store]]:
        with linkless(tmp_path / "linkless") as folder:
            yield functools.partial(open_disk, folder / "run")


class TestRamRecords(StoreSuite):
    @pytest.fixture
    def opener(self, in_memory: Path) -> Callable[[], Store]:
        return functools.partial(open_ram, in_memory / "ram")


class TestRamImages(StoreSuite):
    """Keys of images, which go into slots."""

    key_suffix = ".safetensors"

    @pytest.fixture
    def opener(self, in_memory: Path) -> Callable[[], Store]:
        return functools.partial(open_ram, in_memory / "ram")

    @pytest.fixture
    def store(self, opener: Callable[[], RamStore]) -> Iterator[Store]:
        store = opener()
        yield store
        store.close()


class TestBucket(StoreSuite):
    """An object store in memory, which other processes reach."""

    readers_outlast_keys = False

    @pytest.fixture
    def opener(self) -> Iterator[Callable[[], Store]]:
        with serve(ObjectServer()) as bucket:
            yield functools.partial(open_bucket, bucket)


class TestBucketInTrouble(StoreSuite):
    """Of its requests every tenth fails, half of them once they have taken effect."""

    readers_outlast_keys = False

    @pytest.fixture
    def opener(self) -> Iterator[Callable[[], Store]]:
        with serve(ObjectServer(plan=troubles(seed=1, share=0.1))) as bucket:
            yield functools.partial(open_bucket, bucket)
