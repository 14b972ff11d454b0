"""Train a small network on the nodes of a Slurm job, one process on each; train.sbatch starts it.

Environment: RUN is the run's directory, STEPS the number of steps (100), and STEP_SECS the least
time of one (0). Each rank appends its lines to RUN.logs/RANK: where it starts, and for each step
the loss and a digest of what it has of the state.
"""

import os
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import holdfast
from holdfast import save_decision_policy as policies

RUN = os.environ["RUN"]
STEPS = int(os.environ.get("STEPS", "100"))
STEP_SECS = float(os.environ.get("STEP_SECS", "0"))
BATCH, WIDTH = 64, 128


def initial_state(replicated: NamedSharding, divided: NamedSharding) -> dict:
    """Every rank has the parameters, and a share of the optimizer's momentum."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return {
        "params": jax.device_put(params, replicated),
        "momentum": jax.device_put(jax.tree.map(jnp.zeros_like, params), divided),
    }


def loss_of(params: list, batch: jax.Array) -> jax.Array:
    """Of predicting a batch that is turned by one."""
    hidden = jnp.tanh(batch @ params[0])
    return jnp.mean((hidden @ params[1] - jnp.roll(batch, 1, axis=1)) ** 2)


def update(state: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
    """One step: the new state and the loss."""
    loss, slopes = jax.value_and_grad(loss_of)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], slopes)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, loss


def digest(state: dict) -> str:
    """Of the bits of this rank's share."""
    crc = 0
    for leaf in jax.tree.leaves(state):
        crc = zlib.crc32(np.asarray(leaf.addressable_data(0)).tobytes(), crc)
    return f"{crc:08x}"


def train(log: TextIO) -> None:
    """Go on from the newest checkpoint until the last step, or until told to leave."""
    mesh = jax.make_mesh((jax.device_count(),), ("nodes",))
    replicated = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec("nodes"))
    shardings = {"params": replicated, "momentum": divided}
    step_of = jax.jit(update, out_shardings=(shardings, replicated))
    state = initial_state(replicated, divided)
    ram = holdfast.RamTier(save_decision_policy=policies.FixedIntervalPolicy(1))
    with holdfast.CheckpointManager(
        RUN, save_decision_policy=policies.FixedIntervalPolicy(50), ram=ram
    ) as manager:
        start, state = manager.resume(state)
        sources = manager.last_restore.sources if manager.last_restore else {}
        print("start", start, *(f"{tier}={size}" for tier, size in sources.items()), file=log)
        for step in range(start, STEPS):
            began = time.monotonic()
            generator = np.random.default_rng((step, jax.process_index()))
            rows = generator.standard_normal((BATCH, WIDTH), np.float32)
            batch = jax.make_array_from_process_local_data(divided, rows)
            state, loss = step_of(state, batch)
            print("step", step, float(loss).hex(), digest(state), file=log)
            time.sleep(max(0.0, began + STEP_SECS - time.monotonic()))
            manager.save(step, state)
            if manager.reached_preemption(step):
                print("preempted", step, file=log)
                return
        manager.finish(STEPS - 1, state)
        print("finished", STEPS - 1, file=log)


def main() -> None:
    """Join the other processes and train."""
    jax.distributed.initialize()  # by Slurm's variables
    logs = Path(f"{RUN}.logs")
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with open(logs / str(jax.process_index()), "a", buffering=1) as log:
            train(log)
    except Exception:
        # JAX's own end waits for the other processes, which wait for this one in a step.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
