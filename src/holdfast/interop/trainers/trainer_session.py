"""`TrainerSession`: the calls on a manager that a trainer's callbacks make, in their order.

The objects of the state are the same for the whole training: their states are read when a
checkpoint is due, and set in place when the training continues from one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast import CheckpointManager
from holdfast.errors import StepNotFoundError

log = logging.getLogger(__name__)


class TrainerSession:
    """A manager of one run, for a trainer that calls back after each step.

    Args:
        directory: the run's path or URL.
        options: arguments of `CheckpointManager`.

    Attributes:
        is_preempted: whether a preemption was announced and its step is saved: end the training.
    """

    def __init__(self, directory: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        self._manager = CheckpointManager(directory, framework="torch", **options)
        self.is_preempted = False
        self._last: tuple[int, Any] | None = None

    def read(self, name: str) -> tuple[int, Any] | None:
        """Return the newest step that can be restored and its state at `name`.

        Returns:
            None for a run without checkpoints.
        """
        try:
            restored = self._manager.restore(only=name)
        except StepNotFoundError:
            return None
        report = self._manager.last_restore
        assert report is not None
        return report.step, restored[name]

    def resume(
        self,
        step: int,
        state: Mapping[str, Any],
        of_ranks: Mapping[str, Any],
        *,
        only: Sequence[str] | None = None,
    ) -> None:
        """Set the objects to their states of `step`.

        Args:
            step: a step that `read` returned.
            state: objects and values whose states are the same on all ranks, or distributed.
            of_ranks: objects with a state for each rank. They are left as they are, with a
                warning, if another number of processes saved them.
            only: the names to set; None: all.
        """
        saved = self._manager.process_values(step)
        count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        differing = [name for name in of_ranks if len(saved.get(name, ())) not in (0, count)]
        if differing:
            log.warning(
                "step %d was saved by another number of processes than this job's %d: the states "
                "of %s are not restored",
                step,
                count,
                ", ".join(differing),
            )
        objects = {**state, **({} if differing else of_ranks)}
        self._manager.resume(objects, step=step, only=only, partial=differing)

    def save(self, step: int, state: Mapping[str, Any], *, force: bool = False) -> bool:
        """Save the state after `step` if that is due; return whether it is saved."""
        is_saved = self._manager.save(step, state, force=force)
        self._last = step, state
        self.is_preempted = self._manager.reached_preemption(step)
        return is_saved

    def finish(self, step: int, state: Mapping[str, Any]) -> bool:
        """Make the last step durable, whatever the policies decide; return whether this did it."""
        return self._manager.finish(step, state)

    def finish_last(self) -> None:
        """Make the step that was passed last durable, unless preempted."""
        if self._last is not None and not self.is_preempted:
            self._manager.finish(*self._last)

    def close(self, *, finishes: bool) -> None:
        """Close the manager; with `finishes`, make the last step durable unless preempted.

        Without `finishes` it is closed as by its `with` block, which an error may be leaving.
        """
        if not finishes:
            self._manager.__exit__(*sys.exc_info())
            return
        self.finish_last()
        self._manager.close()
