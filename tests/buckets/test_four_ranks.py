"""A job of four ranks on one host, 20 MiB each: the requests and the memory of its agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

import holdfast
from tests.buckets.fault_proxy import FaultProxy
from tests.buckets.test_costs import counted, image_requests
from tests.hosts import Host
from tests.trainer.job import start_job

RANKS, RANK_MIB, STEPS = 4, 20, 3
AGENT_BYTES = 32 << 20
"""The figure of docs/buckets.md."""


def anonymous_bytes(pid: int) -> int:
    """The memory of a process that no file backs: slots are files of a tmpfs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """The greatest memory of that process within, as the only element."""
    most, ended = [anonymous_bytes(pid)], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            most[0] = max(most[0], anonymous_bytes(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_four_ranks_take_the_requests_and_the_memory_that_the_document_has(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    job = start_job(
        [one_host] * RANKS,
        proxied_url,
        device_count=1,
        steps=STEPS,
        interval=1,
        big_mib=RANKS * RANK_MIB,
        big_sharded=True,
        # One checkpoint is durable before the next one begins.
        settle=True,
        sleep=2,
    )
    job.await_lines("start", secs=180)
    pid = one_host.agent().pid
    before = anonymous_bytes(pid)
    with watched(pid) as most:
        job.await_lines("trained", secs=900)
        assert one_host.agent().pid == pid
    job.results(300)
    assert most[0] - before < AGENT_BYTES, f"{before} bytes, and then {most[0]}"
    commits = [
        number
        for number, request in enumerate(proxy.requests)
        if request.method == "PUT" and "manifests/" in request.path
    ]
    assert len(commits) == STEPS
    sizes = {}
    for path, size_bytes in proxy.written:
        image = path.partition("?")[0]
        if "safetensors" in image and "partNumber" in path:
            sizes[image] = sizes.get(image, 0) + size_bytes
    assert min(sizes.values()) > RANK_MIB << 20
    # After the first commit the agent reads the attempts once.
    for last, commit in pairwise(commits[1:]):
        found = counted(proxy.requests[last + 1 : commit + 1])
        assert found["image"] == RANKS * image_requests(max(sizes.values())), found
        assert found["put"] == RANKS + 1, found
        assert found["get"] <= RANKS + 1, found
        assert found["list"] <= 6, found
    assert holdfast.open_run(proxied_url).latest_step() == STEPS - 1
