"""What several hosts cost the steps between checkpoints: each host is a process with its own agent.

A call that waits for anything, be it another process, a lock or a collective, gives up its
processor: the kernel counts that as a voluntary context switch of the thread.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rank_processes import measured_by_ranks

STEP_SECS = 0.01
STATE_ROWS = 1024


def steps_between(*, directory: str, hosts: int, steps: int) -> dict[str, Any]:
    """Over all hosts: the calls of `save` that took no checkpoint, what they took, their waits."""
    found = measured_by_ranks(hosts, _train, directory, steps)
    call_secs = [secs for one in found for secs in one["call_secs"]]
    return {
        "hosts": hosts,
        "saves": min(one["saves"] for one in found),
        "calls": len(call_secs),
        "waits": sum(one["waits"] for one in found),
        "call_secs": statistics.median(call_secs),
        "call_p999_secs": statistics.quantiles(call_secs, n=1000)[-1],
    }


def _train(
    address: str, count: int, rank: int, pipe: Connection, directory: str, steps: int
) -> None:
    """One host's process: its own name, RAM folder and agent."""
    ram = Path(os.environ["HOLDFAST_RAM"]) / f"host-{rank}"
    ram.mkdir(parents=True, exist_ok=True)
    os.environ.update(HOLDFAST_HOST=f"bench-{rank}", HOLDFAST_RAM=str(ram))
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import holdfast

    jax.distributed.initialize(address, count, rank)
    everywhere = NamedSharding(Mesh(jax.devices(), ("x",)), PartitionSpec())
    state = {"w": jax.jit(lambda: jnp.ones((STATE_ROWS, 1024)), out_shardings=everywhere)()}
    call_secs, waits, saves = [], 0, 0
    with holdfast.CheckpointManager(directory) as manager:
        manager.resume(state)
        for step in range(steps):
            time.sleep(STEP_SECS)
            before, started = _waits(), time.perf_counter()
            is_saved = manager.save(step, state)
            secs = time.perf_counter() - started
            if is_saved:
                saves += 1
            else:
                call_secs.append(secs)
                waits += _waits() - before
    pipe.send({"call_secs": call_secs, "waits": waits, "saves": saves})
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
