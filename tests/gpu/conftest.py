"""What the tests on a GPU share. `make gpu` runs them; without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import Host, host


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here")


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made
