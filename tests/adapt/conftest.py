from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapt.stand_in_device import StandInDevice
from tests.hosts import Host, host


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    """JAX's CPU arrays are on this device."""
    with StandInDevice().serving() as made:
        yield made


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made
