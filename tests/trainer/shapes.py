"""One process of a job whose arrays are laid over its devices in one way or another.

Arguments: coordinator's address, count, rank, directory, what to do as JSON. Prints JSON lines.
It lays its state out as `layout` says, restores what is there into that, and saves one step more.
Every element has one right value after each step, whoever has it.
"""

from __future__ import annotations

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import holdfast
from holdfast import save_decision_policy

ROWS, COLUMNS = 48, 36
ARRAYS = {"weights": np.float32, "moments": jnp.bfloat16, "counts": np.int32}

# By name: the mesh's shape, of which 0 is as many as are left, its axes, and by which of them the
# rows and columns of each array are divided.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, P]]] = {
    "data parallel": ((0,), ("data",), {}),
    "fully sharded": (
        (0,),
        ("data",),
        {"weights": P("data"), "moments": P("data"), "counts": P("data")},
    ),
    "mixed": (
        (0, 2),
        ("data", "model"),
        {"weights": P("data", "model"), "moments": P(None, "model"), "counts": P("data")},
    ),
    "replicated over slices": (
        (2, 0),
        ("slice", "shard"),
        {"weights": P("shard"), "moments": P(None, "shard")},
    ),
    "columns": (
        (0,),
        ("data",),
        {"weights": P(None, "data"), "moments": P("data"), "counts": P(None, "data")},
    ),
}


def values(name: str, step: int) -> np.ndarray:
    ramp = (np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) + 17 * step) % 251
    return (ramp + len(name)).astype(ARRAYS[name])


def state_at(step: int, layout: str) -> dict:
    shape, axes, specs = LAYOUTS[layout]
    devices = np.array(jax.devices())
    left = len(devices) // int(np.prod([n for n in shape if n]))
    mesh = Mesh(devices.reshape([n or left for n in shape]), axes)

    def laid(name: str) -> jax.Array:
        sharding = NamedSharding(mesh, specs.get(name, P()))
        whole = values(name, step)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return {name: laid(name) for name in ARRAYS} | {"step": step}


def is_right(state: dict, expected: dict) -> bool:
    return state["step"] == expected["step"] and all(
        state[name].sharding == expected[name].sharding
        and all(
            np.asarray(mine.data).tobytes() == np.asarray(other.data).tobytes()
            for mine, other in zip(
                state[name].addressable_shards, expected[name].addressable_shards, strict=True
            )
        )
        for name in ARRAYS
    )


def main() -> None:
    address, count, rank, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    todo = json.loads(sys.argv[5])
    if count > 1:
        jax.distributed.initialize(address, count, rank)
    domain = todo["domains"][rank] if "domains" in todo else None
    with holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        ram=holdfast.RamTier(linger_secs=60),
        network=holdfast.HostNetwork(failure_domain=domain),
    ) as manager:
        layout = todo["layout"]
        start, state = manager.resume(state_at(-1, layout))
        right = is_right(state, state_at(start - 1, layout))
        print(json.dumps({"start": start, "right": right}))
        manager.save(start, state_at(start, layout))
        if todo.get("dies") and rank == count - 1:
            # Without closing its manager, so that all agents linger.
            manager.wait_until_finished()
            jax.distributed.shutdown()
            sys.stdout.flush()
            os._exit(0)
    if count > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
