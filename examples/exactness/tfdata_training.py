"""Train on data of tf.data, and lose nothing when the program is killed.

    holdfast prove --without data -- python tfdata_training.py

Shuffled batches over several epochs, read ahead. The files of tf.train.Checkpoint are a leaf of the
state. How far tf.data has read ahead depends on time, and so do their bytes: `--without data`
compares everything else, which follows from the batches.
"""

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import holdfast

EPOCHS = 3
SIZE = 24
BATCH = 4  # six batches an epoch
SEED = 7


class Batches:
    """The batches of a tf.data.Dataset, with its position as a state."""

    def __init__(self, data: tf.data.Dataset) -> None:
        self._iterator = iter(data)
        self._checkpoint = tf.train.Checkpoint(iterator=self._iterator)

    def __next__(self):
        """Return the next batch as arrays of NumPy."""
        return [part.numpy() for part in next(self._iterator)]

    def state_dict(self) -> dict[str, bytes]:
        """Return the files of a checkpoint, by name."""
        with tempfile.TemporaryDirectory() as folder:
            self._checkpoint.write(f"{folder}/position")
            return {file.name: file.read_bytes() for file in Path(folder).iterdir()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Go to the position that these files have."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in state.items():
                Path(folder, name).write_bytes(content)
            self._checkpoint.read(f"{folder}/position").assert_consumed()


def make_data() -> tf.data.Dataset:
    """Return batches of numbers, and of twice each with noise."""
    random = np.random.default_rng(SEED)
    x = random.normal(size=SIZE)
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x + random.normal(size=SIZE)))
    data = data.shuffle(SIZE, seed=SEED).repeat(EPOCHS)
    return data.map(lambda x, y: (x, y), num_parallel_calls=4).batch(BATCH).prefetch(8)


def main() -> None:
    """Train."""
    state = {"w": np.zeros(2), "data": Batches(make_data())}
    with holdfast.CheckpointManager("runs/tfdata", framework="numpy") as manager:
        start, state = manager.resume(state)
        for step in range(start, EPOCHS * SIZE // BATCH):
            x, y = next(state["data"])
            inputs = np.stack([x, np.ones(BATCH)])
            errors = state["w"] @ inputs - y
            state["w"] = state["w"] - 0.1 * inputs @ errors / BATCH
            manager.save(step, state, metrics={"loss": float(np.square(errors).mean())})
            if manager.reached_preemption(step):
                break
        else:
            manager.finish(step, state)


if __name__ == "__main__":
    main()
