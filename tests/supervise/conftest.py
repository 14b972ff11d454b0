from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import Host, host


@pytest.fixture
def one_host() -> Iterator[Host]:
    """A host of the test's own."""
    with host() as own:
        yield own
