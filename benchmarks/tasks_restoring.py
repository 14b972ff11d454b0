"""Restores: from RAM after a crash, from a warm and a cold disk, and onto another sharding."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import limits as machine
from benchmarks import states
from benchmarks.memory import PeakMemory
from benchmarks.systems import SYSTEMS, abstract


def fill(*, system: str, directory: str, kind: str, size_gb: float, rows: int = 0) -> None:
    """Saves one state durably, prints its fingerprint, and is killed with SIGKILL."""
    state = states.make(kind, size_gb)
    if rows:
        state = jax.device_put(state, _sharded(rows, by_row=True))
    opened = SYSTEMS[system](Path(directory))
    opened.save_now(0, state)
    opened.wait()
    print(f'{{"fingerprint": "{states.fingerprint(state)}"}}')
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(
    *, system: str, directory: str, kind: str, size_gb: float, cold: bool, runs: int = 1
) -> dict[str, Any]:
    """Restore in a fresh process.

    `cold`: the page cache was emptied before, and opening the run is a part of the time, since a
    job that comes back to a cold host waits for both.
    """
    like = abstract(states.make(kind, size_gb))
    jnp.ones(8).block_until_ready()
    secs = []
    emptied = machine.drop_caches() if cold else False
    opening = time.perf_counter()
    opened = SYSTEMS[system](Path(directory))
    open_secs = time.perf_counter() - opening
    try:
        for _ in range(runs):
            started = opening if cold else time.perf_counter()
            state = opened.restore(like)
            jax.block_until_ready(state)
            secs.append(time.perf_counter() - started)
        found = states.fingerprint(state)
        step_function = states.any_step()
        started = time.perf_counter()
        state, _ = step_function(state, jnp.ones(1))
        jax.block_until_ready(state)
        first_step = time.perf_counter() - started
    finally:
        opened.close()
    return {
        "secs": min(secs),
        "open_secs": open_secs,
        "fingerprint": found,
        "emptied": emptied,
        "first_step_secs": first_step,
    }


def restore_memory(*, system: str, directory: str, kind: str, size_gb: float) -> dict[str, Any]:
    """The most memory that a restore takes, the restored state included."""
    folder = Path(directory)
    like = abstract(states.make(kind, size_gb))
    # What making it took goes back to the system, so that it is not used again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    before = PeakMemory.of_now(folder)
    opened = SYSTEMS[system](folder)
    try:
        with PeakMemory(before) as memory:
            state = opened.restore(like)
            jax.block_until_ready(state)
        size = states.size_bytes(state)
    finally:
        opened.close()
    return {"size_bytes": size, "over_bytes": memory.peak_bytes}


def reshard(*, system: str, directory: str, size_gb: float, count: int) -> dict[str, Any]:
    """Restores `count` row pieces as `count` column pieces, and counts the bytes it read."""
    made = states.make("large", size_gb)
    size = states.size_bytes(made)
    like = abstract(jax.device_put(made, _sharded(count, by_row=False)))
    del made
    opened = SYSTEMS[system](Path(directory))
    try:
        before = _read_bytes()
        started = time.perf_counter()
        state = opened.restore(like)
        jax.block_until_ready(state)
        secs = time.perf_counter() - started
        read = _read_bytes() - before
        found = states.fingerprint(state)
    finally:
        opened.close()
    return {"secs": secs, "read_bytes": read, "size_bytes": size, "fingerprint": found}


def open_many(*, directory: str, count: int, times: int) -> dict[str, Any]:
    """Seconds to open a run with `count` checkpoints and tell its latest step, each of `times`."""
    folder = Path(directory)
    import holdfast
    from holdfast import preservation_policy

    _make_many(folder, count)
    secs = []
    for _ in range(times + 1):
        started = time.perf_counter()
        manager = holdfast.CheckpointManager(
            folder, preservation_policy=preservation_policy.LatestN(10**6)
        )
        manager.latest_step()
        secs.append(time.perf_counter() - started)
        manager.close()
    # The first opening also starts the agent.
    return {"first_secs": secs[0], "secs": secs[1:]}


def _make_many(folder: Path, count: int) -> None:
    """Makes the run by saving once and copying that checkpoint under other names."""
    import msgspec
    import numpy as np

    import holdfast
    from holdfast.format.names import CheckpointId, checkpoint_folder, manifest_key
    from holdfast.format.records import Manifest, PartRecord
    from holdfast.format.sealed import record_digest, seal, unseal

    with holdfast.CheckpointManager(folder) as manager:
        manager.save(0, {"w": np.ones(8)}, force=True)
    (part_path,) = folder.glob("checkpoints/*/part-*")
    (image_path,) = part_path.parent.glob("image-*")
    part = unseal(part_path.read_bytes(), PartRecord, "part")
    committed = folder / manifest_key(part.id)
    manifest = unseal(committed.read_bytes(), Manifest, "manifest")
    for step in range(1, count):
        made = folder / checkpoint_folder(CheckpointId(step, part.attempt))
        made.mkdir()
        record = seal(msgspec.structs.replace(part, step=step))
        (made / part_path.name).write_bytes(record)
        os.link(image_path, made / image_path.name)
        reference = msgspec.structs.replace(manifest.parts[0], record_digest=record_digest(record))
        sealed = seal(msgspec.structs.replace(manifest, step=step, parts=(reference,)))
        (folder / manifest_key(CheckpointId(step, part.attempt))).write_bytes(sealed)


def _sharded(count: int, *, by_row: bool) -> NamedSharding:
    mesh = Mesh(jax.devices()[:count], ("x",))
    return NamedSharding(mesh, PartitionSpec("x") if by_row else PartitionSpec(None, "x"))


def _read_bytes() -> int:
    """Bytes that this process asked the system for, from the page cache or not."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError
