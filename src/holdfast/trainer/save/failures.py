"""Keep the failures of one rank's saves until they are raised, and log each once.

A manager that warns of failed saves has their failures logged. The calls that wait for all saves
raise them too, unless the last save is safe.

Not thread-safe: `Progress` holds its lock around each call. See docs/decisions/0053.
"""

from __future__ import annotations

import logging
from collections import deque

from holdfast.engine.lifecycle.commit import NOTHING_SAVED
from holdfast.errors import HoldfastError, SaveFailedError
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import SKIPPED
from holdfast.trainer.save.drops import MAY_CONTINUE

STEPS_SHOWN_MAX = 10
SAVES_CONTINUE = f". {MAY_CONTINUE}later saves are attempted as usual"
WARNED_MAX = 100
"""Of how many saves that failed with a warning the errors are kept, until a later one is safe."""

log = logging.getLogger(__name__)


class Failures:
    """The failures that were not raised yet.

    Args:
        warns: Log the failures of saves, instead of raising them at the next call.
    """

    def __init__(self, *, warns: bool) -> None:
        self._warns = warns
        self._queue: deque[HoldfastError] = deque()
        self._warned: deque[SaveFailedError] = deque(maxlen=WARNED_MAX)
        """Failures that were logged, in the order in which they came."""
        self._has_warned_skipped = False
        self._has_warned_failure = False

    def __bool__(self) -> bool:
        """Whether there is one to raise; may be asked without the lock."""
        return bool(self._queue)

    def add(self, error: HoldfastError) -> None:
        """Add an error that is no failure of a save, or that is raised in any case."""
        self._queue.append(error)

    def add_once(self, error: HoldfastError) -> None:
        """Add an error, unless one of the same text waits already."""
        if str(error) not in map(str, self._queue):
            self._queue.append(error)

    def add_failed(self, checkpoint: CheckpointId, reason: str, outcome: str, brief: str) -> None:
        """Add a failed save, and log it.

        Args:
            checkpoint: The checkpoint.
            reason: Why it has failed.
            outcome: What has become of it, in words, for the error.
            brief: The same for the log.
        """
        message = f"save step {checkpoint.step}: {outcome}: {reason}"
        if not reason.endswith(NOTHING_SAVED):
            message += SAVES_CONTINUE
        self._add_save_error(SaveFailedError(checkpoint.step, message))
        # Storage may fail for hours: of failures that are raised only the first one since a success
        # is a warning.
        is_repeated = self._has_warned_failure and not self._warns
        level = logging.DEBUG if is_repeated else logging.WARNING
        self._has_warned_failure = True
        log.log(level, "step %d %s: %s", checkpoint.step, brief, reason)

    def add_dropped(self, error: SaveFailedError) -> SaveFailedError | None:
        """Take the failure of dropped saves; return it if it is to be raised at once."""
        if not self._warns:
            return error
        log.warning("%s", error)
        self._warned.append(error)
        return None

    def has_succeeded(self) -> None:
        """Record that a save has succeeded: the next failure is a warning again."""
        self._has_warned_failure = False

    def log_drop(self, checkpoint: CheckpointId, reason: str, *, is_by_step: bool) -> None:
        """Log a dropped save; the first one that another rank skipped is a warning.

        The rank that skipped it warns on its own host, and here `save` has returned True.
        """
        is_skipped = is_by_step and reason.endswith(SKIPPED)
        level = logging.WARNING if is_skipped and not self._has_warned_skipped else logging.DEBUG
        self._has_warned_skipped |= is_skipped
        log.log(level, "step %d is not saved: %s", checkpoint.step, reason)

    def end(self, dropped: SaveFailedError | None, *, is_last_safe: bool) -> None:
        """Take what counts at the end of all saving.

        Args:
            dropped: The failure of dropped saves that were not replaced.
            is_last_safe: Whether the last save is safe, which makes up for logged failures.
        """
        if dropped is not None:
            self._add_save_error(dropped)
        if not is_last_safe:
            self._queue.extend(self._warned)
        self._warned.clear()

    def take(self) -> HoldfastError:
        """Remove and return the oldest one; of failed saves, one error for all of them."""
        error = self._queue.popleft()
        if not isinstance(error, SaveFailedError):
            return error
        failed = [error, *(each for each in self._queue if isinstance(each, SaveFailedError))]
        self._queue = deque(each for each in self._queue if each not in failed)
        return _together(failed)

    def _add_save_error(self, error: SaveFailedError) -> None:
        (self._warned if self._warns else self._queue).append(error)


def _together(failed: list[SaveFailedError]) -> SaveFailedError:
    """Return one error for all failed saves, with the reasons of the first and the last one."""
    if len(failed) == 1:
        return failed[0]
    failed.sort(key=lambda error: error.step)
    steps = tuple(sorted({step for error in failed for step in error.steps}))
    shown = ", ".join(map(str, steps[:STEPS_SHOWN_MAX]))
    more = f" and {len(steps) - STEPS_SHOWN_MAX} more" if len(steps) > STEPS_SHOWN_MAX else ""
    message = (
        f"save steps {shown}{more}: {len(steps)} checkpoints were not made or are not "
        f"confirmed. The first: "
        f"{failed[0]}. The last: {failed[-1]}"
    )
    return SaveFailedError(steps[0], message, steps)
