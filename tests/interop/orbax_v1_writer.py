"""Write checkpoints by the second interface of any Orbax that has it, and list what they hold.

It runs in an environment that has that Orbax and not Holdfast. `contents.json` lists, by the name
of each checkpoint, what a reader must find.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ITEM = "model"
CONFIG = {"layers": [1, None, 2.5], "name": "small"}
CUSTOM = {"lr": 0.25, "tags": ["a", "b"]}


class Counter:
    """An object that saves its own state."""

    def __init__(self, count):
        self.count = count

    async def save(self, directory):
        text = str(self.count)

        async def write():
            path = await directory.await_creation()
            (path / "count.txt").write_text(text)

        return write()

    async def load(self, directory):
        async def read():
            self.count = int((directory / "count.txt").read_text())

        return read()


def tree(shift):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return {
        "split": jax.device_put(jnp.arange(16.0).reshape(8, 2) + shift, split),
        "half": (jnp.arange(5) / 3 + shift).astype(jnp.bfloat16),
        "numbers": [np.arange(6, dtype=np.int64).reshape(2, 3) + shift, shift, shift + 0.1],
        "text": f"step {shift}",
        "nothing": None,
        "empty": {},
        "pair": (jnp.int32(shift), jnp.ones((2, 2), jnp.int8)),
    }


def shown(value):
    """The type and the bits of each leaf of a tree, by its path."""
    if isinstance(value, dict):
        return {name: shown(found) for name, found in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [shown(found) for found in value]
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        kind = "jax" if isinstance(value, jax.Array) else "numpy"
        found = np.asarray(value)
        return [kind, str(found.dtype), list(found.shape), found.tobytes().hex()]
    return repr(value)


def save(ocp, path, state):
    call = getattr(ocp, "save", None) or ocp.save_pytree
    call(path, state, custom_metadata=CUSTOM)


def context(ocp):
    """Options by which `config` is saved as JSON; None with a release that has no such handler."""
    try:
        module = importlib.import_module(f"{ocp.__name__}._src.handlers.json_handler")
    except ImportError:
        return None
    registry = ocp.handlers.local_registry()
    try:
        registry.add(module.JsonHandler, checkpointable_name="config")
    except TypeError:
        registry.add(module.JsonHandler, "config")
    return ocp.Context(
        checkpointables_options=ocp.options.CheckpointablesOptions(registry=registry)
    )


def checkpointables(state, count, with_json):
    return {ITEM: state, "other": {"x": jnp.ones(3) * count}} | (
        {"config": CONFIG, "count": Counter(count)} if with_json else {}
    )


def items_shown(found):
    return {
        name: found.count
        if isinstance(found, Counter)
        else found
        if name == "config"
        else shown(found)
        for name, found in found.items()
    }


def main(folder):
    ocp = importlib.import_module("orbax.checkpoint.experimental.v1")
    contents = {}
    save(ocp, folder / "tree", tree(1))
    contents["tree"] = {"tree": shown(tree(1)), "custom": CUSTOM}
    if hasattr(ocp, "save_checkpointables"):
        options = context(ocp)
        with options or ocp.Context():
            for name, missing in (("items", None), ("without", "other")):
                made = checkpointables(tree(2), 7, options is not None)
                ocp.save_checkpointables(folder / name, made, custom_metadata=CUSTOM)
                if missing is not None:
                    shutil.rmtree(folder / name / missing)
                    made.pop(missing)
                contents[name] = {"items": items_shown(made), "custom": CUSTOM}
    if hasattr(ocp, "training"):
        steps = {}
        with (
            options or ocp.Context(),
            ocp.training.Checkpointer(
                folder / "run", custom_metadata={"run": "first"}
            ) as checkpointer,
        ):
            save_step = getattr(checkpointer, "save", None) or checkpointer.save_pytree
            save_step(1, tree(3), metrics={"loss": 0.5}, custom_metadata=CUSTOM)
            steps[1] = {"tree": shown(tree(3)), "custom": CUSTOM, "metrics": {"loss": 0.5}}
            made = checkpointables(tree(4), 9, options is not None)
            steps[2] = {"items": items_shown(made), "custom": CUSTOM, "metrics": {"loss": 0.25}}
            checkpointer.save_checkpointables(
                2, made, metrics={"loss": 0.25}, custom_metadata=CUSTOM, force=True
            )
        contents["run"] = {"steps": steps, "custom": {"run": "first"}}
    (folder / "contents.json").write_text(json.dumps(contents))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
