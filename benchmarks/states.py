"""The states that are saved, and the training steps that make them; all of float32.

- `adam`: parameters with Adam's two moments, in layers of 4 MiB matrices.
- `many`: 20,000 leaves of 4 KB.
- `large`: 3 leaves of one third each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GB = 10**9
SIDE = 1024
MANY_COUNT = 20_000
MANY_SIZE = 1024

State = dict[str, Any]


def make(kind: str, size_gb: float, seed: int = 0) -> State:
    """A state of about `size_gb` (10^9 bytes); of `many` it is the number of leaves that counts."""
    rng = np.random.default_rng(seed)
    if kind == "adam":
        layers = max(1, round(size_gb * GB / (3 * 4 * SIDE * SIDE)))
        return {
            group: {f"layer_{i:03d}": _random(rng, (SIDE, SIDE)) for i in range(layers)}
            for group in ("params", "mu", "nu")
        }
    if kind == "many":
        count = max(3, round(MANY_COUNT * size_gb / 0.08))
        return {f"leaf_{i:05d}": _random(rng, (MANY_SIZE,)) for i in range(count)}
    if kind == "large":
        rows = 8 * max(1, round(size_gb * GB / (3 * 4 * 8 * SIDE)))
        return {name: _random(rng, (rows, SIDE)) for name in ("a", "b", "c")}
    raise ValueError(f"no state is called {kind!r}")


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.random(shape, np.float32))


def size_bytes(state: State) -> int:
    """The bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def fingerprint(state: State) -> str:
    """A digest over all bytes."""
    import xxhash

    digest = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(state):
        digest.update(np.ascontiguousarray(leaf).data)
    return digest.hexdigest()


def train_step(matmuls: int) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """A donated step of Adam on the `adam` state; `matmuls` per layer set how long it computes."""

    def loss(params: State, batch: jax.Array) -> jax.Array:
        x = batch
        for weight in params.values():
            for _ in range(matmuls):
                x = jnp.tanh(x @ weight * 0.03)
        return jnp.mean(x * x)

    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["nu"], grads)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-4 * m / (jnp.sqrt(v) + 1e-8), state["params"], mu, nu
        )
        return {"params": params, "mu": mu, "nu": nu}, value

    return jax.jit(step, donate_argnums=0)


def any_step() -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """A donated step that changes every leaf of any state, and computes next to nothing."""

    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        return jax.tree.map(lambda x: x * 0.999 + 0.001, state), jnp.sum(batch)

    return jax.jit(step, donate_argnums=0)
