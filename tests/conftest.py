"""What every test runs under."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import prepared

# Eight devices on one processor, for the tests of shardings; to be said before JAX is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# What interpreters do first that tests start; see the `sitecustomize` there.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (os.environ.get("PYTHONPATH", ""), str(Path(__file__).with_name("startup"))))
)

# A shared machine's pauses fail no test, and the same code is tried with the same examples.
settings.register_profile("holdfast", deadline=None, derandomize=True)
settings.load_profile("holdfast")

# A script that starts the tests in the background has made them, and all their children, ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def environment_put_back() -> Iterator[None]:
    """Puts back the variables that a test's code sets for its own process, as commands do."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents try again soon what has failed: the three tries of a save take no 4 s."""
    name = "holdfast.coordination.settings:Settings.storage_retry_secs"
    monkeypatch.setenv(prepared.TIMES, json.dumps({name: 0.1}))
