"""Two processes of one job, of which the second makes mistakes: `DIRECTORY ADDRESS RANK`.

They use managers one after another: of each, an error of the second process ends the call of the
first one, and the next manager is not held up. Prints `ENDED` and what was seen.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import holdfast
import holdfast.interop.orbax as ocp
from holdfast.interop.orbax import v1
from holdfast.interop.orbax.experimental.emergency import checkpoint_manager as emergency
from holdfast.interop.orbax.experimental.emergency import p2p
from holdfast.interop.orbax.experimental.emergency import (
    replicator_checkpoint_manager as replicator,
)


def array(value: float) -> jax.Array:
    mesh = jax.make_mesh((4,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = np.full((8,), value, np.float32)
    return jax.make_array_from_callback((8,), sharding, lambda index: whole[index])


def of_first() -> jax.Array:
    """An array of which the second process holds nothing."""
    devices = [device for device in jax.devices() if device.process_index == 0]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    indices = sharding.addressable_devices_indices_map((8,))
    pieces = [jax.device_put(np.full(4, 7, np.float32), device) for device in indices]
    return jax.make_array_from_single_device_arrays((8,), sharding, pieces, dtype=np.float32)


def attempt(call: Any) -> list[str]:
    try:
        return ["ok", str(call())]
    except Exception as error:
        return [type(error).__name__, str(error)]


def tiered(folder: Path, is_mistaken: bool) -> dict[str, Callable[[], Any]]:
    """The constructors of managers with several tiers, with what they refuse if `is_mistaken`."""
    mesh = jax.make_mesh((4,), ("x",))
    places = (folder / "local", folder / "persistent")
    often = emergency.LocalCheckpointOptions(debug_use_full_global_mesh=is_mistaken)
    shifted = p2p.options.LocalCheckpointOptions(save_interval_offset_steps=int(is_mistaken))
    peers = p2p.checkpoint_manager.CheckpointManager
    return {
        "emergency": lambda: emergency.CheckpointManager(
            *places, mesh, {}, options=emergency.CheckpointManagerOptions(local=often)
        ),
        "replicator": lambda: replicator.ReplicatorCheckpointManager(
            places[0],
            replicator.ReplicatorCheckpointManagerOptions(use_colocated_python=is_mistaken),
            persistent_directory=places[1],
        ),
        "p2p": lambda: peers(
            mesh, {}, *places, options=p2p.options.CheckpointManagerOptions(local=shifted)
        ),
        "p2p without a directory": lambda: peers(
            mesh, {}, places[0], None if is_mistaken else places[1]
        ),
        "policy": lambda: replicator.ReplicatorCheckpointManager(
            places[0],
            replicator.ReplicatorCheckpointManagerOptions(
                preservation_policy=object() if is_mistaken else None
            ),
            persistent_directory=places[1],
        ),
    }


def main() -> None:
    folder, address, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    jax.distributed.initialize(address, 2, rank)
    state = {"w": array(1), "n": 1}
    save, restore = ocp.args.StandardSave, ocp.args.StandardRestore
    seen: dict[str, Any] = {}
    with ocp.CheckpointManager(folder / "restored") as manager:
        manager.save(1, args=save(state))
        manager.wait_until_finished()
        wrong = restore({**state, "more": 1}) if rank else restore(state)
        seen["structure"] = attempt(lambda: manager.restore(1, args=wrong))
        wrong = ocp.args.JsonRestore() if rank else restore(state)
        seen["arguments"] = attempt(lambda: manager.restore(1, args=wrong))
        restored = manager.restore(1, args=restore(state))
        seen["restored"] = [float(part.data[0]) for part in restored["w"].addressable_shards]
        alone = {"w": array(2), "p": of_first()}
        manager.save(2, args=save(alone))
        manager.wait_until_finished()
        found = manager.restore(2, args=restore(alone))["p"]
        seen["elsewhere"] = [float(part.data[0]) for part in found.addressable_shards]
    manager = ocp.CheckpointManager(folder / "dropped")
    manager.save(1, args=save(state))
    seen["save"] = attempt(lambda: manager.save(2, args=save({"w": object()} if rank else state)))
    del manager
    gc.collect()
    refused = {"atomicity_options": object()} if rank else {}
    options = ocp.CheckpointManagerOptions(**refused)
    seen["options"] = attempt(lambda: ocp.CheckpointManager(folder / "new", options=options))
    unknown = {"item_handlers": {"a": object()}} if rank else {}
    seen["handlers"] = attempt(lambda: ocp.CheckpointManager(folder / "new", **unknown))
    context = v1.Context()
    if rank:
        context.file.path_permission_mode = 0o700
    seen["context"] = attempt(lambda: v1.training.Checkpointer(folder / "new", context=context))
    for name, call in tiered(folder / "tiers", bool(rank)).items():
        seen[name] = attempt(call)
    network = {} if rank else {"network": 1}
    seen["native"] = attempt(lambda: holdfast.CheckpointManager(folder / "native", **network))
    for name, steps in (("new", (1,)), ("another", (1,)), ("dropped", (3, 4))):
        with ocp.CheckpointManager(folder / name) as manager:
            taken = [manager.save(step, args=save(state)) for step in steps]
            manager.wait_until_finished()
            seen[name] = [taken, list(manager.all_steps(read=True))]
    print("ENDED", json.dumps(seen), flush=True)
    # JAX's own end waits for the other process.
    os._exit(0)


main()
