"""What a process of a job does with JAX alone: it joins the job, and makes and checks arrays."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# A rank that is ahead of the others waits so long for them.
LOCKSTEP_MS = 120_000


def start(address: str, count: int, rank: int, heartbeat_secs: int) -> None:
    initialize = jax.distributed.initialize
    # Before JAX 0.7 the timeout is a fixed one.
    is_known = "heartbeat_timeout_seconds" in inspect.signature(initialize).parameters
    initialize(
        address,
        count,
        rank,
        **({"heartbeat_timeout_seconds": heartbeat_secs} if is_known else {}),
    )
    assert jax.process_count() == count


def shut_down() -> None:
    jax.distributed.shutdown()


def await_others(step: int) -> None:
    """Waits until all ranks have come to `step`, as a collective in the step would."""
    client = distributed.global_state.client
    assert client is not None
    client.wait_at_barrier(f"step {step}", LOCKSTEP_MS)


def scalar(value: float) -> Any:
    return jnp.float32(value)


def array(rows: np.ndarray, is_sharded: bool) -> Any:
    """An array over all devices of the job, sharded by rows or replicated."""
    spec = PartitionSpec("x") if is_sharded else PartitionSpec()
    return _array(rows, NamedSharding(_mesh(), spec))


def are_equal(mine: Any, other: Any) -> bool:
    """Whether what this process holds of two arrays is the same."""
    return all(
        np.array_equal(np.asarray(a.data), np.asarray(b.data))
        for a, b in zip(mine.addressable_shards, other.addressable_shards, strict=True)
    )


@functools.cache
def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def _array(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
