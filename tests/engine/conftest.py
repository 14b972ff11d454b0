from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.engine.making import disk, memory_folder
from tests.engine.stores import ram


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a folder for the duration of the test, in memory where possible."""
    with memory_folder() as folder:
        yield Path(folder)


@pytest.fixture
def durable(root: Path) -> DiskStore:
    return disk(root / "run")


@pytest.fixture
def memory(root: Path) -> Iterator[RamStore]:
    store = ram(root / "ram")
    yield store
    store.close()
