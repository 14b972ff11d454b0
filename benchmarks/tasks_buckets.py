"""Upload to and restore from a bucket of SeaweedFS on tmpfs, beside obstore on the same bytes.

Both send parts of the same size, and as many at once. The restore takes turns with reads of the
same ranges by as many threads, into memory that is there already.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
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
from holdfast.store.bucket import PART_SIZE_MIN_BYTES, BucketStore
from holdfast.store.location import RunLocation
from holdfast.store.object_service import connect
from holdfast.store.upload_pace import PARTS_AT_ONCE

GB = 10**9
RANGE_BYTES = SPAN_SIZE_MAX_BYTES


def _obstore(bucket: str) -> Any:
    """Return obstore's own client of the bucket, as the environment configures it."""
    from obstore.store import S3Store

    options = {"allow_http": True, "timeout": timedelta(seconds=300)}
    store: Any = S3Store
    return store(bucket.partition("://")[2], client_options=options)


def _timed(call: Callable[[], object]) -> dict[str, float]:
    began, before = time.monotonic(), time.process_time()
    call()
    return {"secs": time.monotonic() - began, "cpu_secs": time.process_time() - before}


def upload(*, url: str, size_gb: float, count: int) -> dict[str, Any]:
    """Seconds, and processor seconds, of uploads by Holdfast's store and by obstore, in turns."""
    import obstore

    bucket, prefix = RunLocation(url).bucket_and_prefix()
    plain = _obstore(bucket)
    store = BucketStore(connect(bucket), f"{prefix}/", SystemClock())
    image = memoryview(np.random.default_rng(0).bytes(int(size_gb * GB)))

    def parts() -> Iterator[memoryview]:
        for start in range(0, len(image), PART_SIZE_MIN_BYTES):
            yield image[start : start + PART_SIZE_MIN_BYTES]

    def put_plain(number: int) -> None:
        options = {"use_multipart": True, "chunk_size": PART_SIZE_MIN_BYTES}
        obstore.put(
            plain, f"{prefix}/plain-{number}", parts(), max_concurrency=PARTS_AT_ONCE, **options
        )

    found: dict[str, list[dict[str, float]]] = {"holdfast": [], "obstore": []}
    for number in range(count):
        calls = {
            "holdfast": lambda number=number: store.put(f"image-{number}", image),
            "obstore": lambda number=number: put_plain(number),
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
    target = memoryview(bytearray(largest["size"]))

    def read(start: int) -> None:
        stop = min(start + RANGE_BYTES, len(target))
        target[start:stop] = memoryview(
            obstore.get_range(plain, largest["path"], start=start, end=stop)
        )

    def read_plain() -> None:
        with ThreadPoolExecutor(REMOTE_THREAD_COUNT) as pool:
            [*pool.map(read, range(0, len(target), RANGE_BYTES))]

    like = {"w": np.zeros_like(array)}
    found: dict[str, list[dict[str, float]]] = {"holdfast": [], "obstore": []}
    with open_run(url) as run:
        calls = {"holdfast": lambda: run.restore(1, like=like), "obstore": read_plain}
        for number in range(count):
            for name in calls if number % 2 == 0 else reversed(calls):
                found[name].append(_timed(calls[name]))
    return {"size_bytes": len(array), **found}


def train_to(
    *, url: str, place: str, system: str, size_gb: float, steps: int, periods: int
) -> dict[str, Any]:
    """Trains as `torch_train` does; checkpoints go to `place`, or where that is empty to `url`."""
    from benchmarks.bucket_systems import BUCKET_SYSTEMS
    from benchmarks.tasks_torch import trained

    place = place or url

    def processor_secs() -> float:
        return sum(sum(agent.cpu_times()[:2]) for agent in agents(place))

    return trained(
        lambda: BUCKET_SYSTEMS[system](place), "adam", size_gb, steps, periods, processor_secs
    )


def in_bucket(*, folder: str, measured: str, **arguments: Any) -> dict[str, Any]:
    """Run one of the tasks at a server of its own, whose objects lie in `folder`."""
    from tests.buckets.s3_server import BUCKET, running_server

    place = Path(folder) / "server"
    place.mkdir(parents=True)
    with running_server(place) as server:
        os.environ |= server.environment() | {"HOLDFAST_STATE": f"{folder}/state"}
        # The server makes a bucket with its first object.
        connect(f"s3://{BUCKET}").put("first", [b"1"])
        tasks: dict[str, Callable[..., dict[str, Any]]] = {
            "upload": upload,
            "restore": restore_bucket,
            "train": train_to,
        }
        return tasks[measured](url=f"s3://{BUCKET}/bench/run", **arguments)
