"""A state of very many leaves: a restore beside the saves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import holdfast

SAVES = 4
LEAF_SIZE = 16


def leaves(*, directory: str, framework: str, count: int) -> dict[str, Any]:
    """Saves `count` small arrays of float32, each time as other objects, and restores them.

    Args:
        directory: of the run.
        framework: "jax" or "numpy".
        count: of leaves, each of 64 bytes.

    Returns:
        `save_secs`: what each call of `save` took; `sealed_secs`: until it was in RAM and durable;
        `restore_secs`: of three restores `like` what was saved, in the process that saved it.
    """
    state = _made(framework, count, 0)
    save_secs, sealed_secs, restore_secs = [], [], []
    with holdfast.CheckpointManager(Path(directory)) as manager:
        for step in range(SAVES):
            state = _made(framework, count, step)
            began = time.perf_counter()
            manager.save(step, state, force=True)
            save_secs.append(time.perf_counter() - began)
            manager.wait_until_finished()
            sealed_secs.append(time.perf_counter() - began)
        like = _like(state) if framework == "jax" else state
        for _ in range(3):
            began = time.perf_counter()
            found = manager.restore(like=like)
            jax.block_until_ready(found)
            restore_secs.append(time.perf_counter() - began)
            _check(found, state)
    return {
        "save_secs": save_secs,
        "sealed_secs": sealed_secs,
        "restore_secs": restore_secs,
    }


def _made(framework: str, count: int, step: int) -> dict[str, Any]:
    make = jnp.asarray if framework == "jax" else np.asarray
    found = {
        f"leaf_{number:06d}": make(np.full(LEAF_SIZE, step + number, np.float32))
        for number in range(count)
    }
    return jax.block_until_ready(found) if framework == "jax" else found


def _like(state: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def _check(found: dict[str, Any], state: dict[str, Any]) -> None:
    for name in list(state)[:: len(state) // 100]:
        np.testing.assert_array_equal(found[name], state[name])
