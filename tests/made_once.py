"""Make once what several processes of the tests use, and takes long to make."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, which JSON can hold: made by the first process that asks for it.

    Tests that share a fixture of their module may be divided among the processes of `make test`.
    """
    own = folders.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    result = shared / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(make()))
    return json.loads(result.read_text())
