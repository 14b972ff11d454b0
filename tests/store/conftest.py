from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.making import memory_folder


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a tmpfs where there is one."""
    with memory_folder() as folder:
        yield Path(folder)
