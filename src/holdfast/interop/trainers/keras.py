"""Keras 3: `HoldfastCheckpoint(directory)`, its callback `OrbaxCheckpoint` on Holdfast, and `load`.

The callback is Keras's own; its checkpointer is the one of `holdfast.interop.orbax.v1`. Keras
imports Orbax for it, so both must be installed.
"""

from __future__ import annotations

import os
from typing import Any

from holdfast.interop.orbax.v1 import training

try:
    from keras.callbacks import OrbaxCheckpoint
except ImportError as error:
    raise ImportError(
        "holdfast.interop.trainers.keras: expected Keras 3.13 or newer, with keras.callbacks."
        f"OrbaxCheckpoint, found one without it: {error}"
    ) from error


class HoldfastCheckpoint(OrbaxCheckpoint):  # type: ignore[misc]
    """Keras's `OrbaxCheckpoint`, with its arguments, which saves with Holdfast."""

    def __init__(self, directory: str | os.PathLike[str], *arguments: Any, **named: Any) -> None:
        super().__init__(os.fspath(directory), *arguments, **named)
        of_orbax: Any = vars(self)["checkpointer"]
        of_orbax.close()
        keeps = None
        if self.max_to_keep is not None:
            keeps = training.preservation_policies.LatestN(self.max_to_keep)
        self.checkpointer = training.Checkpointer(
            directory,
            preservation_policy=keeps,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
        )


def load(model: Any, directory: str | os.PathLike[str], step: int | None = None) -> int | None:
    """Set the state of a compiled and built model to that of `step`, or of the newest one.

    Returns:
        The step; None, and the model unchanged, if there is no checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint of `step`.
    """
    with training.Checkpointer(directory) as checkpointer:
        if step is None:
            newest = checkpointer.latest
            if newest is None:
                return None
            step = newest.step
        checkpointables = checkpointer.load_checkpointables(step)
    model.set_state_tree(checkpointables["pytree"])
    return step
