"""Trains a small network and kills itself once a file says so: `FRAMEWORK FOLDER`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import holdfast

framework, folder = sys.argv[1], Path(sys.argv[2])
first = {"count": os.environ["HOLDFAST_RESTART_COUNT"], "pid": os.getpid()}
first["imported"] = framework in sys.modules
if framework == "jax":
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adamw(1e-3)
    params = {"w": jnp.ones((4, 4))}
    state = {"params": params, "opt": optimizer.init(params)}

    @jax.jit
    def update(state: dict) -> dict:
        grads = jax.grad(lambda params: jnp.sum(params["w"] ** 2))(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}
else:
    import torch

    first["seed"] = torch.initial_seed()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "opt": optimizer}

    def update(state: dict) -> dict:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return state


with holdfast.CheckpointManager(
    folder / "run",
    ram=holdfast.RamTier(save_decision_policy=holdfast.save_decision_policy.FixedIntervalPolicy(1)),
) as manager:
    start, state = manager.resume(state)
    print(json.dumps({**first, "start": start}), flush=True)
    end = folder / f"end-{first['count']}"
    for step in range(start, 10**6):
        state = update(state)
        manager.save(step, state)
        if end.exists() and step > start + 2:
            if end.read_text() != "kill":
                break
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
    manager.finish(step, state)
