from collections.abc import Iterator

import pytest

from tests.hosts import Host, host


@pytest.fixture
def one_host() -> Iterator[Host]:
    with host() as made:
        yield made
