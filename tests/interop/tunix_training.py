"""Train with Tunix's `PeftTrainer`: `DIRECTORY KIND STEP`. Killed after STEP; prints a digest.

KIND is `orbax` or `holdfast` (by the page's example). It prints the step at which the training
began, and a digest of the model and the optimizer.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft import checkpoint_manager, hooks, peft_trainer

from tests.interop.page_examples import examples

STEPS, WIDTH = 12, 8


class Model(nnx.Module):
    """Two layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.first(x)))


class Kill(hooks.TrainingHooks):
    """Kills the process at the start of a step, when the step before is durable."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_start(self, train_ctx: Any) -> None:
        pass

    def on_train_end(self, train_ctx: Any) -> None:
        pass

    def on_train_step_start(self, train_ctx: Any) -> None:
        if train_ctx.train_steps == self._step:
            train_ctx.checkpoint_manager._checkpoint_manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        pass

    def on_eval_step_start(self, train_ctx: Any) -> None:
        pass

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        pass


def loss(model: Model, x: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(model(x) - y))


def batches() -> list[dict[str, Any]]:
    draw = np.random.default_rng(3)
    drawn = [draw.normal(size=(4, WIDTH)).astype(np.float32) for _ in range(STEPS + 2)]
    return [{"x": x, "y": x.sum(axis=1, keepdims=True)} for x in drawn]


def main() -> None:
    directory, kind, step = sys.argv[1:]
    if kind == "holdfast":
        exec(examples()["Tunix"], {})
    assert (checkpoint_manager.ocp is ocp) == (kind == "orbax")
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=100,
        max_steps=STEPS,
        checkpoint_root_directory=directory,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=3, max_to_keep=2),
    )
    trainer = peft_trainer.PeftTrainer(Model(), optax.adam(1e-2), config).with_loss_fn(loss)
    first = trainer.train_steps
    trainer.with_training_hooks(Kill(int(step)))
    trainer.train(batches())
    digest = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves((nnx.state(trainer.model), nnx.state(trainer.optimizer))):
        digest.update(np.asarray(leaf).tobytes())
    print("ENDED", first, trainer.train_steps, digest.hexdigest())


main()
