"""A training with one of Orbax's managers for several tiers, by Orbax's calls.

`python orbax_tiers.py KIND FOLDER LAST END` continues from the newest checkpoint to step LAST, then
ends normally (END is `close`) or by SIGKILL (`kill`), and prints what it has continued from.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import holdfast.interop.orbax as ocp
from holdfast.interop.orbax.experimental.emergency import checkpoint_manager as emergency
from holdfast.interop.orbax.experimental.emergency import p2p
from holdfast.interop.orbax.experimental.emergency import (
    replicator_checkpoint_manager as replicator,
)

WAIT_SECS = 240.0


class Iterator:
    """An iterator whose state is one number."""

    def __init__(self):
        self.at = 0


class IteratorHandler(ocp.CheckpointHandler):
    """Writes the state of an iterator into the item's folder, as Grain's handler does."""

    def save(self, directory, args):
        (directory / "state.json").write_text(json.dumps(args.item.at))

    def restore(self, directory, args):
        args.item.at = json.loads((directory / "state.json").read_text())
        return args.item


@ocp.args.register_with_handler(IteratorHandler, for_save=True, for_restore=True)
class IteratorArgs(ocp.args.CheckpointArgs):
    def __init__(self, item):
        self.item = item


def opened(kind, folder, mesh, abstract):
    """The manager: RAM at every second step, storage at every fifth."""
    local, persistent = folder / "local", folder / "persistent"
    match kind:
        case "emergency":
            options = emergency.CheckpointManagerOptions(
                local=emergency.LocalCheckpointOptions(save_interval_steps=2, max_to_keep=2),
                persistent=emergency.PersistentCheckpointOptions(save_interval_steps=5),
            )
            return emergency.CheckpointManager(local, persistent, mesh, abstract, options=options)
        case "p2p":
            options = p2p.options.CheckpointManagerOptions(
                local=p2p.options.LocalCheckpointOptions(save_interval_steps=2, max_to_keep=2),
                persistent=p2p.options.PersistentCheckpointOptions(save_interval_steps=5),
            )
            return p2p.checkpoint_manager.CheckpointManager(
                mesh, abstract, local, persistent, options=options
            )
    options = replicator.ReplicatorCheckpointManagerOptions(save_interval_steps=2)
    return replicator.ReplicatorCheckpointManager(
        local, options, global_mesh=mesh, persistent_directory=persistent
    )


def main(kind, folder, last, end):
    item = "data_iter" if kind == "p2p" else "dataset"
    devices = 1 if kind == "emergency" else 2
    mesh = jax.make_mesh((devices, 8 // devices), ("replica", "data"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    state = {"w": jax.device_put(jnp.zeros(16), sharding), "step": 0}
    abstract = {"w": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding), "step": 0}
    iterator, seen = Iterator(), {}
    manager = opened(kind, Path(folder), mesh, abstract)
    found = manager.latest_step()
    if found is not None:
        like = ocp.checkpoint_utils.construct_restore_args(abstract)
        wanted = {"state": ocp.args.PyTreeRestore(abstract, restore_args=like)}
        wanted[item] = IteratorArgs(iterator)
        read = manager.restore(None, args=ocp.args.Composite(**wanted))
        state = read["state"]
        seen = {"steps": list(manager.all_steps()), "at": found, "iterator": iterator.at}
        seen |= {
            "w": [float(state["w"].addressable_data(0)[0]), str(state["w"].sharding.spec)],
            "step": state["step"],
        }
    for step in range(0 if found is None else found + 1, int(last) + 1):
        iterator.at += 1
        state = {"w": state["w"] + 1, "step": step}
        items = {"state": ocp.args.PyTreeSave(state), item: IteratorArgs(iterator)}
        manager.save(step, ocp.args.Composite(**items))
        until(lambda step=step: step % 2 or manager.latest_step() == step)
    print(json.dumps(seen), flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    manager.close()


def until(is_so):
    """Wait for the copy into RAM, which ends after `save` has returned."""
    limit = time.monotonic() + WAIT_SECS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
