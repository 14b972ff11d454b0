"""How many requests a checkpoint takes at a real server, and what they cost: docs/buckets.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from holdfast import CheckpointManager
from holdfast.store.bucket.bucket import PART_COUNT_MAX, PART_SIZE_MIN_BYTES
from tests.buckets.fault_proxy import FaultProxy, Request
from tests.hosts import Host

PUT_DOLLARS, GET_DOLLARS = 5e-6, 0.4e-6
"""S3's list prices of a request; deletions are free, and listings cost as PUT."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "buckets.md"


def image_requests(size_bytes: int) -> int:
    """The requests that upload an image."""
    if size_bytes <= PART_SIZE_MIN_BYTES:
        return 1
    return -(-size_bytes // max(PART_SIZE_MIN_BYTES, -(-size_bytes // PART_COUNT_MAX))) + 2


def kind_of(request: Request) -> str:
    if request.method in ("GET", "HEAD"):
        return "list" if "list-type=" in request.path else "get"
    if request.method == "DELETE" or "?delete" in request.path:
        return "delete"
    return "image" if "safetensors" in request.path else "put"


def counted(requests: Iterable[Request]) -> Counter[str]:
    """The requests by kind, without those that a run makes at times: of leases and events."""
    return Counter(kind_of(one) for one in requests if not re.search("leases|events", one.path))


def test_a_checkpoint_takes_the_requests_that_the_formula_has(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    array = np.zeros(2 * PART_SIZE_MIN_BYTES + 1000, np.uint8)
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.resume({"w": array})
        for step in (1, 2, 3):
            proxy.requests.clear()
            manager.save(step, {"w": array + np.uint8(step)}, force=True)
            manager.wait_until_finished()
    found = counted(proxy.requests)
    # The upload, the record, the manifest, and what the manifest's writer reads.
    assert found["image"] == image_requests(array.size) == 5
    assert found["put"] == 2
    assert found["get"] <= 2
    assert found["list"] <= 6
    assert found["delete"] <= 4


def dollars(ranks: int, size_bytes: int) -> float:
    """The price of one checkpoint, as the document has it."""
    puts = ranks * image_requests(size_bytes // ranks) + ranks + 1 + 6
    return puts * PUT_DOLLARS + (ranks + 1) * GET_DOLLARS


@pytest.mark.parametrize("ranks", [1, 64])
def test_the_document_has_the_price_of_a_checkpoint_of_100_gb(ranks: int) -> None:
    price = f"{dollars(ranks, 100 * 10**9):.3f}"
    (line,) = [
        line for line in DOCUMENT.read_text().splitlines() if line.startswith("| price of a")
    ]
    assert f"${price}" in line.split("|")[{1: 2, 64: 3}[ranks]]


@pytest.mark.soak
def test_a_state_of_which_95_percent_is_frozen_uploads_a_tenth_at_most(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    frozen = np.random.default_rng(0).integers(0, 255, 11 * PART_SIZE_MIN_BYTES, np.uint8)
    trained = np.zeros(frozen.size // 19, np.uint8)
    sizes, images = [], []
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.resume({"frozen": frozen, "trained": trained})
        for step in (1, 2, 3, 4):
            proxy.requests.clear()
            proxy.written.clear()
            trained = trained + np.uint8(1)
            manager.save(step, {"frozen": frozen, "trained": trained}, force=True)
            manager.wait_until_finished()
            sizes.append(sum(size_bytes for _, size_bytes in proxy.written))
            images.append(counted(proxy.requests)["image"])
    assert sizes[0] > frozen.size
    # NumPy arrays can be changed in place, so the second save still learns what is frozen.
    assert max(sizes[2:]) <= sizes[0] / 10
    assert max(images[2:]) <= images[0] / 10
