"""Train a small language model with JAX (Flax NNX, Optax, Grain), and lose nothing when killed.

    python jax_nnx.py                      # begins, or goes on where it was killed
    holdfast prove -- python jax_nnx.py    # proves that kills change nothing

The model learns which character follows eight others: shuffled batches over several epochs by
Grain, augmentation, dropout, a schedule, clipped gradients. At each tenth step the loss of held-out
text is measured, and the two best checkpoints are kept. At the end the best one is read, and writes
some text.
"""

import math

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import holdfast

STEPS = 60
BATCH = 32
CONTEXT = 8
WIDTH = 16
EVALUATED = 10
SEED = 7
ANIMALS, KINDS = ("fox", "crow", "hare", "goose", "mouse"), ("red", "old", "shy")
TEXT = "".join(f"the {kind} {animal} sees the {animal}. " for kind in KINDS for animal in ANIMALS)
ALPHABET = sorted(set(TEXT))
CODES = np.array([ALPHABET.index(character) for character in TEXT])
TRAINED = len(CODES) * 3 // 4


def windows_of(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters before each place of a text, and the one at it."""
    return np.lib.stride_tricks.sliding_window_view(codes[:-1], CONTEXT), codes[CONTEXT:]


def make_data() -> grain.DatasetIterator:
    """Return the batches of all epochs: contexts, of which some have another character."""
    contexts, following = windows_of(CODES[:TRAINED])

    def augmented(place: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        # Grain's numbers follow from the seed and the place in the order.
        context = contexts[place].copy()
        if random.random() < 0.1:
            context[0] = random.integers(len(ALPHABET))
        return context, following[place]

    data = grain.MapDataset.range(len(following)).seed(SEED).shuffle().repeat()
    return iter(data.random_map(augmented).batch(BATCH, drop_remainder=True).to_iter_dataset())


class Model(nnx.Module):
    """Scores of the next character, from the characters before it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(len(ALPHABET), WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * WIDTH, 4 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.scores = nnx.Linear(4 * WIDTH, len(ALPHABET), rngs=rngs)

    def __call__(self, contexts: jax.Array) -> jax.Array:
        """Return the scores for each context."""
        flat = self.embedding(contexts).reshape(len(contexts), -1)
        return self.scores(self.dropout(nnx.relu(self.hidden(flat))))


def loss_of(model: Model, contexts: jax.Array, following: jax.Array) -> jax.Array:
    """Return the mean loss of a batch."""
    scores = model(contexts)
    return optax.softmax_cross_entropy_with_integer_labels(scores, following).mean()


@nnx.jit
def train_step(
    model: Model, optimizer: nnx.Optimizer, contexts: jax.Array, following: jax.Array
) -> jax.Array:
    """Make one step, and return its loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, contexts, following)
    optimizer.update(model, gradients)
    return loss


evaluate = nnx.jit(loss_of)


def write(model: Model, length: int = 32) -> str:
    """Return text that the model writes: the likeliest character each time."""
    text, scores_of = TEXT[:CONTEXT], nnx.jit(lambda model, contexts: model(contexts))
    for _ in range(length):
        context = jnp.array([[ALPHABET.index(character) for character in text[-CONTEXT:]]])
        text += ALPHABET[int(scores_of(model, context).argmax())]
    return text


def main() -> None:
    """Train, and use the best checkpoint."""
    model = Model(nnx.Rngs(SEED))
    rates = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 8, STEPS)
    updates = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates))
    optimizer = nnx.Optimizer(model, updates, wrt=nnx.Param)
    data = make_data()
    held_out = windows_of(CODES[TRAINED:])

    def state_now() -> dict:
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer), "data": data}

    best = holdfast.preservation_policy.BestN(2, metric="loss")
    with holdfast.CheckpointManager("runs/jax", preservation_policy=best) as manager:
        start, state = manager.resume(state_now())
        nnx.update(model, state["model"])
        nnx.update(optimizer, state["optimizer"])
        for step in range(start, STEPS):
            loss = train_step(model, optimizer, *next(data))
            metrics = {"training": float(loss), "loss": math.nan}  # NaN: worse than any number
            is_evaluated = (step + 1) % EVALUATED == 0
            if is_evaluated:
                with manager.waiting("evaluation"):
                    model.eval()
                    metrics["loss"] = float(evaluate(model, *held_out))
                    model.train()
                print(f"step {step}: loss {metrics['loss']:.3f}", flush=True)
            manager.save(step, state_now(), metrics=metrics, force=is_evaluated)
            if manager.reached_preemption(step):
                return
        manager.finish(STEPS - 1, state_now())

    with holdfast.open_run("runs/jax") as run:
        losses = {run.metadata(step).metrics["loss"]: step for step in run.all_steps()}
        least = min(loss for loss in losses if not math.isnan(loss))
        restored = run.restore(losses[least], like={"model": nnx.state(model)}, only="model")
    nnx.update(model, restored["model"])
    model.eval()
    print(f"the best is step {losses[least]}, and writes: {write(model)}")


if __name__ == "__main__":
    main()
