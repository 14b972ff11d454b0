"""One of several processes of a job that shares a host; jax.distributed on the CPU.

Arguments: coordinator's address, count, rank, directory, what to do as JSON. Prints JSON lines.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import HoldfastError

WITH_POSITION = json.loads(sys.argv[5]).get("position", True)
# MiB of an array that every process has, and whether it stays as it is.
BIG_MIB = json.loads(sys.argv[5]).get("big_mib", 0)
IS_FROZEN = json.loads(sys.argv[5]).get("frozen", False)


class Position:
    """Each process's own place in its data."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get_state(self) -> dict[str, int]:
        return {"value": self.value}

    def set_state(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def array(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def state_at(step: int, rank: int) -> dict:
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("x",))
    rows = np.arange(16 * 50, dtype=np.float32).reshape(16, 50) + step
    state = {
        "sharded": array(rows, NamedSharding(mesh, PartitionSpec("x"))),
        "replicated": array(rows * 2, NamedSharding(mesh, PartitionSpec())),
        "local": jnp.float32(step),
        "host": np.arange(5) + step,
        "step": step,
    }
    if BIG_MIB:
        everywhere = NamedSharding(mesh, PartitionSpec())
        state["big"] = frozen(everywhere) if IS_FROZEN else array(big_at(step, BIG_MIB), everywhere)
    if WITH_POSITION:
        state["position"] = Position(1000 * rank + step)
    return state


@functools.cache
def frozen(everywhere: NamedSharding) -> jax.Array:
    return array(big_at(0, BIG_MIB), everywhere)


def big_at(step: int, size_mib: int) -> np.ndarray:
    return np.arange(size_mib << 18, dtype=np.float32).reshape(size_mib, 512, 512) - step


def right(state: dict, step: int, rank: int) -> bool:
    expected = state_at(step, rank)
    for name in ("sharded", "replicated", *(["big"] if BIG_MIB else [])):
        for mine, other in zip(
            state[name].addressable_shards, expected[name].addressable_shards, strict=True
        ):
            if not np.array_equal(np.asarray(mine.data), np.asarray(other.data)):
                return False
    return (
        float(state["local"]) == step
        and np.array_equal(state["host"], expected["host"])
        and (not WITH_POSITION or state["position"].value == expected["position"].value)
        and state["step"] == step
    )


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    address, count, rank, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    todo = json.loads(sys.argv[5])
    jax.distributed.initialize(address, count, rank)
    assert jax.process_count() == count
    policy = save_decision_policy.ContinuousCheckpointingPolicy()
    if "interval" in todo:
        policy = save_decision_policy.FixedIntervalPolicy(todo["interval"])
    in_ram = todo.get("ram_interval")
    ram = holdfast.RamTier(
        linger_secs=30,
        copies=todo.get("copies", 2),
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(in_ram) if in_ram else None,
    )
    with holdfast.CheckpointManager(
        directory,
        save_decision_policy=policy,
        preservation_policy=preservation_policy.LatestN(100),
        ram=ram if todo.get("ram", True) else None,
    ) as manager:
        if todo.get("absent") == rank:
            say(absent=os.getpid())
            signal.pause()
        like = state_at(-1, rank)
        if todo.get("other_like") == rank:
            like["another"] = jnp.float32(0)
        start, state = manager.resume(like)
        say(start=start, right=start == 0 or right(state, start - 1, rank))
        if start and todo.get("values"):
            say(values=manager.process_values(start - 1), left_out=manager.last_restore.left_out)
        saved = []
        for step in range(start, start + todo["steps"]):
            time.sleep(todo.get("sleep", 0.002) * (1 + rank * todo.get("lag", 0)))
            if todo.get("signal_at") == step and rank == todo.get("signal_rank", 0):
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.save(step, state_at(step, rank)):
                saved.append(step)
            if manager.reached_preemption(step):
                say(left=step)
                break
        if todo.get("stay"):
            signal.pause()
        manager.wait_until_finished()
        say(saved=saved, steps=manager.all_steps())
    jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        main()
    except HoldfastError as error:
        traceback.print_exc()
        say(error=type(error).__name__, message=str(error))
        # JAX's own end would wait for the other processes.
        os._exit(3)
