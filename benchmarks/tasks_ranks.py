"""Checkpoints of several ranks on one host, which share its agent."""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rank_processes import measured_by_ranks
from benchmarks.tasks_saving import WARM_UP

SIDE = 1024


def ranks_together(*, directory: str, ranks: int, size_gb: float, count: int) -> dict[str, Any]:
    """Takes `count` checkpoints of one state of `size_gb`, of which each rank has an equal part.

    Returns:
        `safe_secs`, `durable_secs`: from the first rank's call of `save` until the checkpoint of
        all ranks was sealed in RAM, and until it was durable, for each checkpoint.
    """
    found = measured_by_ranks(ranks, _train, directory, size_gb, WARM_UP + count)
    sealed, durable = _times(Path(directory))
    steps = range(WARM_UP, WARM_UP + count)
    first = {step: min(of_rank["began"][step] for of_rank in found) for step in steps}
    return {
        "ranks": ranks,
        "safe_secs": [sealed[step] - first[step] for step in steps],
        "durable_secs": [durable[step] - first[step] for step in steps],
    }


def _train(
    address: str,
    count: int,
    rank: int,
    pipe: Connection,
    directory: str,
    size_gb: float,
    saves: int,
) -> None:
    """One rank: its part of each leaf, and the times at which it called `save`."""
    # Eight ranks with a pool of threads for each core would measure the scheduler.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=1 --xla_cpu_multi_thread_eigen=false"
    )
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import holdfast
    from holdfast import preservation_policy

    if count > 1:
        jax.distributed.initialize(address, count, rank)
    in_rows = NamedSharding(Mesh(jax.devices(), ("x",)), PartitionSpec("x"))
    leaves = max(1, round(size_gb * 10**9 / (count * 4 * SIDE * SIDE)))
    make = jax.jit(lambda x: jnp.full((count * SIDE, SIDE), x), out_shardings=in_rows)
    step_function = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 0.999 + 0.001, state), donate_argnums=0
    )
    state = {f"w{i:04d}": make(1.0 + i) for i in range(leaves)}
    began = []
    with holdfast.CheckpointManager(
        directory, preservation_policy=preservation_policy.LatestN(2)
    ) as manager:
        _, state = manager.resume(state)
        for step in range(saves):
            state = jax.block_until_ready(step_function(state))
            if count > 1:
                _all_ranks(step)
            began.append(time.time())
            manager.save(step, state, force=True)
            manager.wait_until_finished()
    pipe.send({"began": began})
    if count > 1:
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()


def _all_ranks(step: int) -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(f"step {step}")


def _times(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    """When each step was sealed by all ranks, and when it was durable, by `time.time`."""
    from holdfast.observe.events.reader import read_events
    from holdfast.observe.events.schema import CheckpointCommitted, CheckpointSealed

    sealed, durable = (
        {event.step: event.time.timestamp() for event in read_events(run, kind)}
        for kind in (CheckpointSealed, CheckpointCommitted)
    )
    return sealed, durable
