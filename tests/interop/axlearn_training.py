"""Train with AXLearn's SpmdTrainer: `DIRECTORY CHECKPOINTER INPUT MESH STEPS KILLED`.

CHECKPOINTER is `axlearn` or `holdfast`, INPUT is `tf` or `grain`, MESH is such as `8x1`. The
training is killed before step KILLED. It prints the last step and a digest of the state.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from axlearn.common import checkpointer as axlearn_checkpointer
from axlearn.common import layers, learner, optimizers
from axlearn.common.base_model import BaseModel
from axlearn.common.config import config_class, config_for_function
from axlearn.common.input_base import Input
from axlearn.common.repeat import Repeat
from axlearn.common.trainer import SpmdTrainer

from tests.interop.page_examples import examples

WIDTH, BATCH, EVERY = 8, 16, 3


class Blocks(Repeat):
    """Equal linear layers, whose parameters are one VDict."""

    def forward(self, inputs: Any) -> Any:
        return self._run(lambda carry, _: (jnp.tanh(self.layer(carry)), {}), inputs).carry


class Model(BaseModel):
    """Regression by a few layers."""

    @config_class
    class Config(BaseModel.Config):
        pass

    def __init__(self, cfg: Any, *, parent: Any) -> None:
        super().__init__(cfg, parent=parent)
        linear = layers.Linear.default_config().set(
            input_dim=WIDTH, output_dim=WIDTH, param_partition_spec=(None, "model")
        )
        self._add_child("blocks", Blocks.default_config().set(layer=linear, num_layers=3))
        self._add_child("last", linear.clone())

    def forward(self, input_batch: Any) -> Any:
        noise = jax.random.normal(self.prng_key, input_batch["x"].shape) * 0.1
        found = self.last(self.blocks(input_batch["x"] + noise))
        return jnp.mean(jnp.square(found - input_batch["y"])), {}


def example(number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    return {name: generator.normal(size=WIDTH).astype(np.float32) for name in "xy"}


class TfInput(Input):
    """Shuffled batches by tf.data."""

    def dataset(self) -> Any:
        rows = [example(number) for number in range(64)]
        whole = {name: np.stack([row[name] for row in rows]) for name in "xy"}
        made = tf.data.Dataset.from_tensor_slices(whole)
        return made.shuffle(32, seed=7).repeat().batch(BATCH, drop_remainder=True)


class GrainInput(Input):
    """Shuffled batches by Grain."""

    def dataset(self) -> Any:
        made = grain.MapDataset.source(range(64)).seed(7).shuffle().map(example).repeat()
        return made.batch(BATCH).to_iter_dataset()


def main() -> None:
    jax.config.update("jax_default_prng_impl", "rbg")  # As AXLearn's launcher does.
    directory, kind, source, mesh, steps, killed = sys.argv[1:]
    policy = config_for_function(axlearn_checkpointer.every_n_steps_policy).set(n=EVERY)
    if kind == "holdfast":
        page = {"SpmdTrainer": SpmdTrainer, "policy": policy}
        exec(examples()["AXLearn"], page)
        config = page["config"]
    else:
        saves = axlearn_checkpointer.Checkpointer.default_config()
        config = SpmdTrainer.default_config().set(checkpointer=saves.set(save_policy=policy))
    config.set(
        name="trainer",
        dir=directory,
        mesh_axis_names=("data", "model"),
        mesh_shape=tuple(int(size) for size in mesh.split("x")),
        model=Model.default_config().set(dtype=jnp.float32),
        input={"tf": TfInput, "grain": GrainInput}[source].default_config(),
        learner=learner.Learner.default_config().set(
            optimizer=config_for_function(optimizers.adam_optimizer).set(
                learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-8
            )
        ),
        max_step=int(steps),
        save_input_iterator=True,
    )
    trainer = config.instantiate(parent=None)
    step_of = trainer._run_step

    def run_step(*arguments: Any, **options: Any) -> Any:
        if trainer.step == int(killed):
            trainer.checkpointer.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
        return step_of(*arguments, **options)

    trainer._run_step = run_step
    trainer.run(jax.random.PRNGKey(0))
    digest = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(trainer.trainer_state):
        digest.update(np.asarray(leaf).tobytes())
    kinds_seen = {type(node).__name__ for node in trainer.trainer_state.model.values()}
    print("ENDED", trainer.step, digest.hexdigest(), *sorted(kinds_seen))


main()
