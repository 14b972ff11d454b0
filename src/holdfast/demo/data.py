"""Provide the batches: a Grain pipeline over random windows of the corpus.

The corpus is text that every machine has: the source files of Python's standard library.

Invariants:
- The corpus depends only on the Python installation.
- The windows of batch number n depend only on the seed, on n, and on the host if there are several:
  each host has its share of the stretches.
- The iterator prefetches in a thread of its own, but its `get_state` describes the batch returned
  last, not the one prefetched last.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import StorageError

_TEXT_BYTES_MIN = 1 << 18
_TEXT_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The amount of text in one training step.

    Attributes:
        windows: The pieces of text in a batch.
        context: The predicted bytes of each piece, each predicted from those before it.
    """

    windows: int = 16
    context: int = 64

    @property
    def tokens(self) -> int:
        """The bytes predicted in one step."""
        return self.windows * self.context


def load_corpus(folder: Path | None = None) -> NDArray[np.uint8]:
    """Read the Python source files of a folder in the order of their names, at most 4 MiB of them.

    Args:
        folder: The folder; None selects the standard library.

    Returns:
        The bytes, uint8 of shape (n,).

    Raises:
        StorageError: There is too little text to train on, or a file cannot be read.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    try:
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    except OSError as error:
        raise StorageError(f"read source files in {folder}: {error}") from error
    if len(text) < _TEXT_BYTES_MIN:
        raise StorageError(
            f"read source files in {folder}: expected at least {_TEXT_BYTES_MIN} bytes of .py "
            f"files, found {len(text)}; use a Python that ships its library as source"
        )
    return np.frombuffer(text[:_TEXT_BYTES_MAX], dtype=np.uint8)


def batch_iterator(
    corpus: NDArray[np.uint8], shape: BatchShape, *, seed: int, host: int = 0, hosts: int = 1
) -> grain.DatasetIterator[NDArray[np.uint8]]:
    """Return an endless iterator over a host's batches, uint8 of shape (windows, context + 1).

    The corpus is cut into stretches, which are shuffled in each epoch, and a window is taken at a
    random offset of each stretch. Host i reads stretches i, i + `hosts`, i + 2 `hosts` and so on of
    that order.
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
    """A host's batches in their order, and a digest of all returned ones; both are saved."""

    def __init__(self, iterator: grain.DatasetIterator[NDArray[np.uint8]]) -> None:
        self._iterator = iterator
        self.digest = ""

    def take(self) -> tuple[NDArray[np.uint8], str]:
        """Return the next batch and its digest."""
        batch = next(self._iterator)
        digest = xxhash.xxh3_64_hexdigest(batch.tobytes())
        self.digest = xxhash.xxh3_128_hexdigest((self.digest + digest).encode())
        return batch, digest

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data, which Holdfast saves."""
        return {"iterator": self._iterator.get_state(), "digest": self.digest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        self._iterator.set_state(state["iterator"])
        self.digest = state["digest"]
