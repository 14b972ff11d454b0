"""The order of batches: a Grain pipeline over random windows of the corpus.

Which windows make up batch number n depends on the seed and on n alone, and on several hosts on the
host: each has its share of the stretches. The iterator reads ahead in a thread of its own; its
`get_state` speaks of the batch handed out last, not of the one read last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
import xxhash
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How much text one training step sees.

    Attributes:
        windows: pieces of text in a batch.
        context: bytes that each piece predicts, each from those before it.
    """

    windows: int = 16
    context: int = 64

    @property
    def tokens(self) -> int:
        """Bytes predicted in one step."""
        return self.windows * self.context


def batch_iterator(
    corpus: NDArray[np.uint8], shape: BatchShape, *, seed: int, host: int = 0, hosts: int = 1
) -> grain.DatasetIterator[NDArray[np.uint8]]:
    """An endless iterator over a host's batches, uint8 of shape (windows, context + 1).

    The corpus is cut into stretches, which are shuffled anew in each epoch; from each stretch a
    window at a random place is taken. Of `hosts` each takes every so many-th stretch.
    """
    window_bytes = shape.context + 1
    stretch_bytes = 2 * window_bytes

    def random_window(stretch: int, rng: np.random.Generator) -> NDArray[np.uint8]:
        start = stretch * stretch_bytes + int(rng.integers(stretch_bytes - window_bytes + 1))
        return corpus[start : start + window_bytes]

    dataset = (
        grain.MapDataset.range(len(corpus) // stretch_bytes)
        .seed(seed)
        .shuffle()
        .slice(slice(host, None, hosts))
        .random_map(random_window)
        .repeat()
        .batch(shape.windows, drop_remainder=True)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    )
    return iter(dataset)


class Batches:
    """A host's batches in their order, and a digest of all that were handed out; both are saved."""

    def __init__(self, iterator: grain.DatasetIterator[NDArray[np.uint8]]) -> None:
        self._iterator = iterator
        self.digest = ""

    def take(self) -> tuple[NDArray[np.uint8], str]:
        """The next batch, and a digest of it."""
        batch = next(self._iterator)
        digest = xxhash.xxh3_64_hexdigest(batch.tobytes())
        self.digest = xxhash.xxh3_128_hexdigest((self.digest + digest).encode())
        return batch, digest

    def get_state(self) -> dict[str, Any]:
        """The place in the data; what Holdfast saves."""
        return {"iterator": self._iterator.get_state(), "digest": self.digest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a place that was saved."""
        self._iterator.set_state(state["iterator"])
        self.digest = state["digest"]
