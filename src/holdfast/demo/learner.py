"""Define what the demo's training loop needs of a framework, and the sizes of the model.

Both frameworks train the same transformer: byte-level, decoder-only and pre-norm, with learned
positions, tied embeddings and dropout, in float32. A step takes about 0.1 s on two cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

FRAMEWORKS = ("jax", "torch")
JOIN_SECS = 60
"""How long the processes of the hosts wait for each other."""
PEAK_RATE = 1.2e-3
END_RATE = 1e-4
"""The learning rate after the warm-up, and at the last step."""
BETA_2 = 0.95
WEIGHT_DECAY = 0.1
GRADIENT_NORM_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of the transformer."""

    vocabulary: int = 256
    context: int = 64
    width: int = 160
    heads: int = 5
    layers: int = 3
    dropout: float = 0.1


class TrainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The training of one process, which has it as JSON on its command line.

    Attributes:
        run: The path or URL of the run.
        journal: The file that the trainer's records are appended to.
        steps: The steps of the whole training, over which the learning rate decays.
        framework: `jax` or `torch`.
        seed: Determines the initial parameters, the dropout and the order of batches.
        interval_secs: The shortest time between two checkpoints.
        hosts: The number of processes, one on each host.
        host: The index of this one.
        coordinator: The address at which they find each other.
        config: The sizes of the model.
    """

    run: str
    journal: str
    steps: int
    framework: str = FRAMEWORKS[0]
    seed: int = 0
    interval_secs: float = 1.0
    hosts: int = 1
    host: int = 0
    coordinator: str = ""
    config: ModelConfig = ModelConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigests:
    """Digests of the parts of a state."""

    params: str
    opt_state: str
    rng: str


class Learner(Protocol):
    """The training in one framework: data parallel, each host with its own batch."""

    def initial_state(self) -> dict[str, Any]:
        """Return the state before the first step, without the data."""
        ...

    def train_step(
        self, state: dict[str, Any], batch: NDArray[np.uint8]
    ) -> tuple[dict[str, Any], float]:
        """Return the next state and the loss; `state` cannot be used afterwards.

        Args:
            state: The state, with other entries that are returned as they are.
            batch: This host's batch, uint8 of shape (windows, context + 1).

        Returns:
            The state, and the mean cross entropy over the batches of all hosts in nats per byte.
        """
        ...

    def state_digests(self, state: dict[str, Any]) -> StateDigests:
        """Return digests of all bits of a state."""
        ...

    def leave_job(self) -> None:
        """Disconnect from the other hosts."""
        ...


def digest_arrays(arrays: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Return a digest over the names, dtypes, shapes and bits of arrays, in their order."""
    state = xxhash.xxh3_128()
    for name, array in arrays:
        state.update(f"{name} {array.dtype} {array.shape}\n".encode())
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()
