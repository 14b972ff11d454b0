"""Train with JAX and Grain, with the data iterator in the state or not.

    holdfast prove -- python jax_training.py

Shuffled batches over several epochs, augmentation, dropout from the state's keys. With `--careless`
the data iterator is not in the state: `holdfast prove` finds the first step with other batches.
"""

import sys

import grain
import jax
import numpy as np
import optax
from flax import nnx

import holdfast

STEPS = 16
SIZE = 24
BATCH = 4  # six batches an epoch
SEED = 7


class Model(nnx.Module):
    """A small network with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(2, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        """Return the scores of each class."""
        return self.out(self.dropout(nnx.relu(self.hidden(points))))


def make_data() -> grain.DatasetIterator:
    """Return the batches of all epochs, with points moved by numbers that follow from the place."""
    points = np.random.default_rng(SEED).normal(size=(SIZE, 2)).astype(np.float32)

    def moved(index: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        point = points[index] + 0.1 * generator.normal(size=2).astype(np.float32)
        return point, np.int32(points[index].prod() > 0)

    data = grain.MapDataset.range(SIZE).seed(SEED).shuffle().repeat().random_map(moved)
    return iter(data.batch(BATCH).to_iter_dataset())


def loss_of(model: Model, points: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the mean loss of a batch."""
    scores = model(points)
    return optax.softmax_cross_entropy_with_integer_labels(scores, classes).mean()


@nnx.jit
def train_step(
    model: Model, optimizer: nnx.Optimizer, points: jax.Array, classes: jax.Array
) -> jax.Array:
    """Make one step, and return its loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, points, classes)
    optimizer.update(model, gradients)
    return loss


def main(careless: bool) -> None:
    """Train."""
    model = Model(nnx.Rngs(SEED))
    schedule = optax.cosine_decay_schedule(1e-2, STEPS)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    data = make_data()

    def state_now() -> dict:
        state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        return state if careless else state | {"data": data}

    with holdfast.CheckpointManager("runs/jax") as manager:
        start, state = manager.resume(state_now())
        nnx.update(model, state["model"])
        nnx.update(optimizer, state["optimizer"])
        for step in range(start, STEPS):
            points, classes = next(data)
            loss = train_step(model, optimizer, points, classes)
            manager.save(step, state_now(), metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                break
        else:
            manager.finish(STEPS - 1, state_now())


if __name__ == "__main__":
    main("--careless" in sys.argv)
