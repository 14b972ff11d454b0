from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import Host, host
from tests.trainer.job import some_hosts


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made


@pytest.fixture
def four_hosts() -> Iterator[list[Host]]:
    with some_hosts(4) as made:
        yield made


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with some_hosts(3) as made:
        yield made


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    with some_hosts(2) as made:
        yield made
