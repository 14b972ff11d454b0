"""Train with Keras on JAX: `DIRECTORY EPOCH`. Killed after EPOCH; prints a digest of the weights.

DIRECTORY `-` trains without checkpoints. `page` runs the example of docs/jax_trainers.md in the
current folder, and prints how many steps the model has been trained.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

from holdfast.interop.trainers.keras import HoldfastCheckpoint, load
from tests.interop.page_examples import examples

EPOCHS, STEPS = 6, 8


class Kill(keras.callbacks.Callback):
    """Kills the process at the end of an epoch, when the checkpoint is durable."""

    def __init__(self, epoch: int, saves: Any) -> None:
        super().__init__()
        self._epoch, self._saves = epoch, saves

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            self._saves.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, killed = sys.argv[1], int(sys.argv[2])
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    x = np.random.default_rng(0).normal(size=(STEPS * 4, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    if directory == "page":
        # The page's example as it is printed, in the current folder.
        exec(examples()["Keras"], {"model": model, "x": x, "y": y})
        print("ENDED", int(model.optimizer.iterations))
        return
    callbacks, first = [], 0
    if directory != "-":
        model.optimizer.build(model.trainable_variables)
        load(model, directory)
        first = int(model.optimizer.iterations) // STEPS
        saves = HoldfastCheckpoint(directory, max_to_keep=2)
        callbacks = [saves, Kill(killed, saves)]
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=EPOCHS,
        initial_epoch=first,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    digest = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        digest.update(np.asarray(variable).tobytes())
    print("ENDED", first, digest.hexdigest())


main()
