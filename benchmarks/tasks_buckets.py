"""Upload to and restore from a bucket of SeaweedFS on tmpfs, beside obstore on the same bytes.

Both send parts of the same size, and as many at once. The restore takes turns with reads of the
same ranges by as many threads. Both make a new array each time, as a restore in a new process does;
the first access to new memory may take as long as the transfer.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import agents
from holdfast import CheckpointManager, open_run
from holdfast.clock import SystemClock
from holdfast.engine.reading.restore import REMOTE_THREAD_COUNT
from holdfast.engine.reading.spans import SPAN_SIZE_MAX_BYTES
from holdfast.store.bucket.bucket import PART_SIZE_MIN_BYTES, BucketStore
from holdfast.store.bucket.object_service import connect
from holdfast.store.bucket.upload_pace import PARTS_AT_ONCE
from holdfast.store.location import RunLocation

GB = 10**9
RESTORES = 3
"""Restores for each upload: their times differ more, since those of new memory do."""
VACUUM_SECS = 10
"""How often the server gives back the room of deleted objects: it keeps them in RAM."""
RANGE_BYTES = SPAN_SIZE_MAX_BYTES


def _obstore(bucket: str) -> Any:
    """Return obstore's own client of the bucket, as the environment configures it."""
    from obstore.store import S3Store

    options = {"allow_http": True, "timeout": timedelta(seconds=300)}
    store: Any = S3Store
    return store(bucket.partition("://")[2], client_options=options)


def _put_plain(store: Any, path: str, image: memoryview) -> None:
    """Upload by obstore alone, in parts as Holdfast's, as many at once."""
    import obstore

    parts = (
        image[start : start + PART_SIZE_MIN_BYTES]
        for start in range(0, len(image), PART_SIZE_MIN_BYTES)
    )
    options = {"use_multipart": True, "chunk_size": PART_SIZE_MIN_BYTES}
    obstore.put(store, path, parts, max_concurrency=PARTS_AT_ONCE, **options)


def _plain_secs_per_gb(url: str, size_gb: float, count: int) -> float:
    """Return the processor seconds of obstore for each GB that it uploads; the median of some."""
    bucket, prefix = RunLocation(url).bucket_and_prefix()
    store, image = _obstore(bucket), memoryview(bytes(int(size_gb * GB)))
    calls = [
        functools.partial(_put_plain, store, f"{prefix}-plain/{n}", image) for n in range(count)
    ]
    return statistics.median(_timed(call)["cpu_secs"] for call in calls) / size_gb


def _timed(call: Callable[[], object]) -> dict[str, float]:
    began, before = time.monotonic(), time.process_time()
    call()
    return {"secs": time.monotonic() - began, "cpu_secs": time.process_time() - before}


def upload(*, url: str, size_gb: float, count: int) -> dict[str, Any]:
    """Seconds, and processor seconds, of uploads by Holdfast's store and by obstore, in turns."""
    bucket, prefix = RunLocation(url).bucket_and_prefix()
    plain = _obstore(bucket)
    store = BucketStore(connect(bucket), f"{prefix}/", SystemClock())
    image = memoryview(np.random.default_rng(0).bytes(int(size_gb * GB)))

    found: dict[str, list[dict[str, float]]] = {"holdfast": [], "obstore": []}
    for number in range(count):
        calls = {
            "holdfast": lambda number=number: store.put(f"image-{number}", image),
            "obstore": lambda number=number: _put_plain(plain, f"{prefix}/plain-{number}", image),
        }
        # Whoever comes second finds the server as the first one left it; so they swap.
        for name in calls if number % 2 == 0 else reversed(calls):
            found[name].append(_timed(calls[name]))
    return {"size_bytes": len(image), **found}


def restore_bucket(*, url: str, size_gb: float, count: int) -> dict[str, Any]:
    """Seconds of restores of one array by Holdfast, and of reads of its bytes by obstore."""
    import obstore

    array = np.frombuffer(np.random.default_rng(0).bytes(int(size_gb * GB)), np.uint8)
    with CheckpointManager(url, ram=None) as manager:
        manager.save(1, {"w": array}, force=True)
    bucket, prefix = RunLocation(url).bucket_and_prefix()
    plain = _obstore(bucket)
    listed = itertools.chain(*obstore.list(plain, prefix=f"{prefix}/checkpoints"))
    largest = max(listed, key=lambda one: int(one["size"]))

    def read_plain() -> None:
        target = np.empty(largest["size"], np.uint8).data

        def read(start: int) -> None:
            stop = min(start + RANGE_BYTES, len(target))
            target[start:stop] = memoryview(
                obstore.get_range(plain, largest["path"], start=start, end=stop)
            )

        with ThreadPoolExecutor(REMOTE_THREAD_COUNT) as pool:
            [*pool.map(read, range(0, len(target), RANGE_BYTES))]

    like = {"w": np.zeros_like(array)}
    found: dict[str, list[dict[str, float]]] = {"holdfast": [], "obstore": []}
    with open_run(url) as run:
        calls = {"holdfast": lambda: run.restore(1, like=like), "obstore": read_plain}
        for number in range(RESTORES * count):
            for name in calls if number % 2 == 0 else reversed(calls):
                found[name].append(_timed(calls[name]))
    return {"size_bytes": len(array), **found}


def train_to(
    *, url: str, place: str, system: str, size_gb: float, steps: int, periods: int
) -> dict[str, Any]:
    """Trains as `torch_train` does; checkpoints go to `place`, or where that is empty to `url`.

    `plain_secs_per_gb` is the processor time of obstore alone, for uploads of as many bytes.
    """
    from benchmarks.bucket_systems import BUCKET_SYSTEMS
    from benchmarks.tasks_torch import trained

    plain_secs_per_gb = _plain_secs_per_gb(url, size_gb, periods)
    place = place or url

    def processor_secs() -> float:
        return sum(sum(agent.cpu_times()[:2]) for agent in agents(place))

    found = trained(
        lambda: BUCKET_SYSTEMS[system](place), "adam", size_gb, steps, periods, processor_secs
    )
    return found | {"plain_secs_per_gb": plain_secs_per_gb}


def in_bucket(*, folder: str, measured: str, **arguments: Any) -> dict[str, Any]:
    """Run one of the tasks at a server of its own, whose objects lie in `folder`.

    A training has all cores but one, with its agent; the server has that one.
    """
    from tests.buckets.s3_server import BUCKET, running_server

    place = Path(folder) / "server"
    place.mkdir(parents=True)
    cores = sorted(os.sched_getaffinity(0))
    with running_server(place, VACUUM_SECS) as server:
        if measured == "train" and len(cores) > 1:
            # A service runs on other machines. On the cores of the training it would be measured.
            server.use_cores({cores[0]})
            os.sched_setaffinity(0, cores[1:])
        os.environ |= server.environment() | {"HOLDFAST_STATE": f"{folder}/state"}
        # The server makes a bucket with its first object.
        connect(f"s3://{BUCKET}").put("first", [b"1"])
        tasks: dict[str, Callable[..., dict[str, Any]]] = {
            "upload": upload,
            "restore": restore_bucket,
            "train": train_to,
        }
        return tasks[measured](url=f"s3://{BUCKET}/bench/run", **arguments)
