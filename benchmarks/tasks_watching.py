"""What being observed costs a training of 100 steps a second: metrics, the live page, events.

The steps are a fixed number of small products of matrices, calibrated to 10 ms. No save is due, so
that only the observation differs: a reader scrapes the metrics each second, a live page is open,
each step reports a wait for data, and some ask for `manager.stats()`.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import holdfast
from holdfast.host.wire.client import status_of
from holdfast.local_agent.place import roots
from holdfast.policy.save_decision_policy import FixedIntervalPolicy

STEP_SECS = 0.01
SCRAPE_SECS = 1.0
METRICS_EVERY = 1000
"""Ten seconds of training: a logger that asks more often is not for so short steps."""
NEVER = 10**9
SIDE = 64
SCRAPER = f"""
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1], timeout=10).read()
    time.sleep({SCRAPE_SECS})
"""
READER = "import sys, urllib.request\nfor _ in urllib.request.urlopen(sys.argv[1]): pass"


class _Work:
    """A step: so many products of small matrices, on one core."""

    def __init__(self) -> None:
        self._one = np.full((SIDE, SIDE), 1.0 / SIDE)
        self.count = 1
        began = time.perf_counter()
        rounds = 2000
        for _ in range(rounds):
            self._one = self._one @ self._one
        self.count = max(1, round(STEP_SECS / ((time.perf_counter() - began) / rounds)))

    def step(self) -> None:
        for _ in range(self.count):
            self._one = self._one @ self._one


def watched(*, directory: str, steps: int, blocks: int) -> dict[str, Any]:
    """Train in blocks that are observed and not observed in turn.

    Returns:
        The median seconds of a step and of its calls, by kind, and those of `metrics` per step.
    """
    work = _Work()
    found: dict[str, list[float]] = {"plain": [], "watched": []}
    calls: dict[str, list[float]] = {"plain": [], "watched": []}
    metrics_secs: list[float] = []
    ram, network = holdfast.RamTier(linger_secs=0), holdfast.HostNetwork(prometheus_port=0)
    with holdfast.CheckpointManager(
        directory,
        framework="numpy",
        save_decision_policy=FixedIntervalPolicy(NEVER),
        ram=ram,
        network=network,
    ) as manager:
        manager.resume({"w": np.zeros(8)})
        number = 1
        for block in range(2 * blocks):
            kind = ("plain", "watched")[(block + block // 2) % 2]
            with _observers(directory) if kind == "watched" else contextlib.nullcontext():
                for _ in range(steps):
                    began = time.perf_counter()
                    work.step()
                    called = time.perf_counter()
                    if kind == "watched":
                        with manager.waiting("data"):
                            pass
                    manager.save(number, {})
                    ended = time.perf_counter()
                    found[kind].append(ended - began)
                    calls[kind].append(ended - called)
                    number += 1
                if kind == "watched":
                    began = time.perf_counter()
                    manager.stats()
                    metrics_secs.append(time.perf_counter() - began)
    return {
        "step_secs": {kind: statistics.median(secs) for kind, secs in found.items()},
        "mean_step_secs": {kind: statistics.mean(secs) for kind, secs in found.items()},
        "call_secs": {kind: statistics.median(secs) for kind, secs in calls.items()},
        "metrics_secs_per_step": statistics.median(metrics_secs) / METRICS_EVERY,
    }


@contextlib.contextmanager
def _observers(directory: str) -> Iterator[None]:
    """A reader of metrics each second, and an open live page, while the block runs."""
    page = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "page", directory], stdout=subprocess.PIPE, text=True
    )
    others: list[subprocess.Popen[Any]] = [page]
    try:
        assert page.stdout is not None
        url = page.stdout.readline().rpartition(": ")[2].split()[0]
        for code, target in ((SCRAPER, _metrics_url()), (READER, f"{url}stream")):
            others.append(subprocess.Popen([sys.executable, "-c", code, target]))
        # Their start is no cost of being observed.
        time.sleep(2.0)
        yield
    finally:
        for process in reversed(others):
            process.terminate()
            process.wait()
        assert page.stdout is not None
        page.stdout.close()


def _metrics_url() -> str:
    for root in roots():
        for folder in root.iterdir() if root.exists() else ():
            status = status_of(folder)
            if status is not None and status.prometheus_url is not None:
                return status.prometheus_url
    raise RuntimeError("the agent serves no metrics")
