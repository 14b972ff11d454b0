"""A small network that trains until it is killed: `FRAMEWORK DIRECTORY JOURNAL`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from holdfast.demo import journal

STEP_SECS = 0.01
SIZE = 64


def main() -> None:
    """Trains; each step is a record of the journal."""
    framework, directory, path = sys.argv[1:]
    state, step_of = {"jax": _jax, "torch": _torch}[framework]()
    log = journal.Journal(Path(path))
    with holdfast.CheckpointManager(
        directory,
        ram=holdfast.RamTier(
            save_decision_policy=holdfast.save_decision_policy.ContinuousCheckpointingPolicy()
        ),
    ) as manager:
        start, state = manager.resume(state)
        log.append(
            journal.Started(pid=os.getpid(), first_step=start, restored_step=None, sources={})
        )
        for step in range(start, sys.maxsize):
            state, loss = step_of(state)
            log.append(journal.Step(step=step, loss=loss.hex(), batch="", secs=STEP_SECS))
            manager.save(step, state)
            time.sleep(STEP_SECS)


Step = Callable[[Any], tuple[Any, float]]


def _jax() -> tuple[Any, Step]:
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adamw(1e-3)
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(first, (SIZE, SIZE)),
        "down": jax.random.normal(second, (SIZE, 1)),
    }

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - 1.0))

    @jax.jit
    def update(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step_of(state: Any) -> tuple[Any, float]:
        params, opt_state, loss = update(state["params"], state["opt"], jnp.ones((16, SIZE)))
        return {"params": params, "opt": opt_state}, float(loss)

    return {"params": params, "opt": optimizer.init(params)}, step_of


def _torch() -> tuple[Any, Step]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step_of(state: Any) -> tuple[Any, float]:
        optimizer.zero_grad()
        loss = (model(torch.ones(16, SIZE)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        return state, float(loss.detach())

    return {"model": model, "optimizer": optimizer}, step_of


if __name__ == "__main__":
    main()
