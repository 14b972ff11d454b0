"""Train on data of Hugging Face's datasets, and lose nothing when the program is killed.

holdfast prove -- python datasets_training.py CASE

order       data with random access, in a global order: any number of processes may go on
replayed    a stream of several shards, shuffled in a buffer: it is read again up to the step
position    one that is not shuffled, by its own state; `--without stream` leaves that out of the
            comparison, since one position has several forms
careless    one that is shuffled, by its own state: this leaves out the buffer, and is not exact
"""

import itertools
import sys

import datasets
import numpy as np

import holdfast

EPOCHS = 3
SIZE = 24
BATCH = 4  # six batches an epoch
SEED = 7


def make_data() -> datasets.Dataset:
    """Return numbers, and twice each with noise."""
    random = np.random.default_rng(SEED)
    numbers = random.normal(size=SIZE)
    return datasets.Dataset.from_dict({"x": numbers, "y": 2 * numbers + random.normal(size=SIZE)})


def streamed(data: datasets.Dataset):
    """Yield the examples of a stream, each epoch in another order."""
    stream = data.to_iterable_dataset(num_shards=4).shuffle(seed=SEED, buffer_size=8)
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        yield from stream


class Epochs:
    """A stream, one epoch after the other, with its position as a state."""

    def __init__(self, stream: datasets.IterableDataset) -> None:
        self._stream = stream

    def __iter__(self):
        """Yield the examples from the position on."""
        while True:
            yield from self._stream
            self._stream.set_epoch(self._stream.epoch + 1)

    def state_dict(self) -> dict:
        """Return the position, with the epoch."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Go to a position. The stream does not set its epoch by itself."""
        self._stream.set_epoch(state["epoch"])
        self._stream.load_state_dict(state)


def batched(examples: Epochs):
    """Yield batches of an endless stream."""
    examples = iter(examples)
    while True:
        yield [*itertools.islice(examples, BATCH)]


def main(case: str) -> None:
    """Train."""
    data = make_data()
    stream = data.to_iterable_dataset(num_shards=4)
    if case == "careless":
        stream = stream.shuffle(seed=SEED, buffer_size=8)
    order = holdfast.data.Order(SIZE, batch=BATCH, seed=SEED)
    if case == "replayed":
        order = holdfast.data.Order(None, batch=BATCH, shuffle=False)
    has_position = case in ("position", "careless")
    position = {"stream": Epochs(stream)} if has_position else {"order": order}
    state = {"w": np.zeros(2), **position}
    with holdfast.CheckpointManager("runs/datasets", framework="numpy") as manager:
        start, state = manager.resume(state)
        if case == "replayed":
            batches = order.replay(streamed(data), start)
        elif has_position:
            batches = batched(state["stream"])
        else:
            source = order.source(data, start)
            batches = (source[step] for step in itertools.count(start))
        for step in range(start, EPOCHS * SIZE // BATCH):
            batch = next(batches)
            x, y = (np.array([example[name] for example in batch]) for name in "xy")
            inputs = np.stack([x, np.ones(BATCH)])
            errors = state["w"] @ inputs - y
            state["w"] = state["w"] - 0.1 * inputs @ errors / BATCH
            manager.save(step, state, metrics={"loss": float(np.square(errors).mean())})
            if manager.reached_preemption(step):
                break
        else:
            manager.finish(step, state)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "order")
