"""The saves that were accepted and are not finished, and the failures that were not told yet.

Shared by the training thread, the saver and the watcher; one lock guards it all.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from holdfast.agent.protocol import Sealed
from holdfast.conditions import Condition
from holdfast.errors import HoldfastError, SaveFailedError
from holdfast.format.names import CheckpointId

STEPS_SHOWN_MAX = 10
LOG_SECS = 10.0
"""How often a wait logs what it waits for."""

log = logging.getLogger(__name__)


class Reach(Enum):
    """How far a save is looked at."""

    SEALED = 0
    """Each save, until its part is whole in RAM."""
    DURABLE = 1
    """The saves that are to be durable, until they are."""
    FINISHED = 2
    """Each save, until it is finished."""


class Saving(NamedTuple):
    """The saves of one reach: how many were accepted so far, and whether one is on its way."""

    accepted_count: int
    is_going_on: bool


@dataclass(slots=True)
class _Save:
    is_durable_due: bool
    sealed: Sealed | None = None


class Progress:
    """What became of each save."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._saves: dict[CheckpointId, _Save] = {}
        self._failures: deque[HoldfastError] = deque()
        self._accepted_count = 0
        self._durable_count = 0
        self.has_failed = False
        self._is_stopped = False

    def accept(self, checkpoint: CheckpointId, *, durable: bool) -> None:
        """A save was accepted."""
        with self._changed:
            self._saves[checkpoint] = _Save(durable)
            self._accepted_count += 1
            self._durable_count += durable

    def seal(self, checkpoint: CheckpointId, message: Sealed) -> None:
        """Its part is whole; one that is not to be durable is finished."""
        with self._changed:
            save = self._saves.get(checkpoint)
            if save is not None:
                save.sealed = message
                if not save.is_durable_due:
                    del self._saves[checkpoint]
            self._changed.notify_all()

    def finish(self, checkpoint: CheckpointId) -> None:
        """It is durable, or was given up without a loss."""
        with self._changed:
            self._saves.pop(checkpoint, None)
            self._changed.notify_all()

    def end(self, checkpoint: CheckpointId, kind: str, reason: str) -> None:
        """It ended as a notice says; one of any other kind changes nothing."""
        if kind == "failed":
            self.fail(checkpoint, reason)
        elif kind in ("committed", "dropped", "deleted"):
            if kind == "dropped":
                log.warning("step %d is not saved: %s", checkpoint.step, reason)
            self.finish(checkpoint)

    def fail(self, checkpoint: CheckpointId, reason: str) -> None:
        """It failed; said once by `raise_failure`. Anything said of an unknown save is ignored."""
        with self._changed:
            if self._saves.pop(checkpoint, None) is not None:
                message = (
                    f"save step {checkpoint.step}: the checkpoint was not made: {reason}. Training "
                    "may go on; the next save is tried anew"
                )
                self._failures.append(SaveFailedError(checkpoint.step, message))
                self.has_failed = True
            self._changed.notify_all()

    def fail_all(self, reason: str) -> None:
        """Nobody knows of any save what becomes of it: no agent answers."""
        with self._changed:
            waiting = list(self._saves)
        for checkpoint in waiting:
            self.fail(checkpoint, reason)

    def tell(self, error: HoldfastError) -> None:
        """Something besides the saves failed; one that waits to be told already counts once."""
        with self._changed:
            if str(error) not in map(str, self._failures):
                self._failures.append(error)
            self.has_failed = True

    def stop(self, error: HoldfastError) -> None:
        """Nothing more can be saved, and nobody waits for what was accepted; told once."""
        with self._changed:
            self._saves.clear()
            if not self._is_stopped:
                self._is_stopped = self.has_failed = True
                self._failures.append(error)
            self._changed.notify_all()

    @contextlib.contextmanager
    def stopped_by(self, kind: type[HoldfastError]) -> Iterator[None]:
        """An error of that class, if it leaves the block, stops all: nobody waits any more."""
        try:
            yield
        except kind as error:
            self.stop(error)
            self.raise_failure()
            raise

    def raise_failure(self) -> None:
        """Raise the oldest failure that was not reported yet; all saves that failed, together.

        Raises:
            SaveFailedError: background saves failed.
        """
        with self._changed:
            if self._failures:
                error = self._failures[0]
                if isinstance(error, SaveFailedError):
                    failed = [one for one in self._failures if isinstance(one, SaveFailedError)]
                    others = [one for one in self._failures if one not in failed]
                    self._failures, error = deque(others), _together(failed)
                else:
                    self._failures.popleft()
                self.has_failed = bool(self._failures)
                raise error

    def outstanding(self) -> int:
        """How many saves are on their way to the durable tier."""
        with self._changed:
            return sum(save.is_durable_due for save in self._saves.values())

    def saving(self, reach: Reach) -> Saving:
        """What is on its way so far."""
        with self._changed:
            saves = self._saves.values()
            if reach is Reach.SEALED:
                return Saving(self._accepted_count, any(save.sealed is None for save in saves))
            if reach is Reach.DURABLE:
                return Saving(self._durable_count, any(save.is_durable_due for save in saves))
            return Saving(self._accepted_count, bool(saves))

    def steps(self) -> set[int]:
        """The steps that are on their way."""
        with self._changed:
            return {checkpoint.step for checkpoint in self._saves}

    def sealed_again(self) -> list[Sealed]:
        """What a new agent has to be told of."""
        with self._changed:
            return [save.sealed for save in self._saves.values() if save.sealed is not None]

    def wait_finished(self, timeout_secs: float | None) -> bool:
        """Wait until nothing is outstanding, and log what is; False: the time is up."""
        waited_secs = 0.0
        while timeout_secs is None or waited_secs < timeout_secs:
            secs = LOG_SECS if timeout_secs is None else min(LOG_SECS, timeout_secs - waited_secs)
            if self.wait(lambda sealed, finished: finished, secs):
                return True
            waited_secs += secs
            if secs == LOG_SECS:
                shown = sorted(self.steps())[:STEPS_SHOWN_MAX]
                log.info("waiting for steps %s to be durable: %.0f s so far", shown, waited_secs)
        return self.wait(lambda sealed, finished: finished, 0)

    def wait(self, is_over: Callable[[bool, bool], bool], timeout_secs: float | None) -> bool:
        """Waits until `is_over(nothing is unsealed, nothing is outstanding)`; False: time is up."""

        def look() -> bool:
            unsealed = any(save.sealed is None for save in self._saves.values())
            return is_over(not unsealed, not self._saves)

        with self._changed:
            return self._changed.wait_for(look, timeout_secs)


def _together(failed: list[SaveFailedError]) -> SaveFailedError:
    """Return one error of all saves that failed, with the reason of the first and the last."""
    if len(failed) == 1:
        return failed[0]
    failed.sort(key=lambda error: error.step)
    steps = tuple(error.step for error in failed)
    shown = ", ".join(map(str, steps[:STEPS_SHOWN_MAX]))
    more = f" and {len(steps) - STEPS_SHOWN_MAX} more" if len(steps) > STEPS_SHOWN_MAX else ""
    message = (
        f"save steps {shown}{more}: {len(steps)} checkpoints were not made. The first: "
        f"{failed[0]} The last: {failed[-1]}"
    )
    return SaveFailedError(steps[0], message, steps)
