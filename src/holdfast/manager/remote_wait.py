"""Wait until the remote tier has a run's newest durable checkpoint.

Each process looks at the tiers itself, so that no agent has to answer for another one. A look has a
thread of its own: a service that does not answer must not hold a caller beyond its timeout.
"""

from __future__ import annotations

import threading

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.commit import is_committed
from holdfast.engine.lifecycle.newest import newest_committed
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    StorageError,
    WaitTimeoutError,
)
from holdfast.format.names import CheckpointId
from holdfast.store.durable import DurableStore

POLL_SECS_MIN, POLL_SECS_MAX = 1.0, 15.0
"""A look at a tier that lacks the checkpoint takes requests, so the pauses grow meanwhile."""


def newest_of_timeline(durable: DurableStore) -> CheckpointId | None:
    """Return the newest checkpoint that a durable tier has; None if there is none.

    Raises:
        CheckpointDamagedError, StorageError: the tier cannot be read.
    """
    return newest_committed(durable, read_attempts(durable))


def wait_for_upload(
    remote: DurableStore, wanted: CheckpointId, timeout_secs: float | None, clock: Clock
) -> None:
    """Wait until the remote tier has a checkpoint, or a later one.

    Raises:
        WaitTimeoutError: the timeout has passed; the agents go on.
    """
    until_secs = clock.monotonic() + timeout_secs if timeout_secs is not None else None
    problem, pause_secs = "it is being copied, or waits for that", POLL_SECS_MIN
    while True:
        look = _Look(remote, wanted)
        try:
            left_secs = until_secs - clock.monotonic() if until_secs is not None else None
            if look.await_answer(left_secs):
                return
        except (CheckpointDamagedError, StorageError) as error:
            problem = str(error)
        except TimeoutError:
            problem = "it does not answer"
        left_secs = until_secs - clock.monotonic() if until_secs is not None else POLL_SECS_MAX
        if left_secs <= 0:
            raise WaitTimeoutError(
                f"wait for step {wanted.step} in the remote tier {remote.home.location_text}: it "
                f"is not there after {timeout_secs:.3g} s ({problem}); the agents go on, see "
                "`holdfast status`"
            )
        clock.sleep(min(pause_secs, left_secs))
        pause_secs = min(1.5 * pause_secs, POLL_SECS_MAX)


class _Look:
    """One look at the remote tier, on a thread that ends with the process."""

    def __init__(self, remote: DurableStore, wanted: CheckpointId) -> None:
        self._remote = remote
        self._wanted = wanted
        self._has_ended = threading.Event()
        self._is_there = False
        self._error: HoldfastError | None = None
        threading.Thread(target=self._look, name="holdfast-remote", daemon=True).start()

    def await_answer(self, timeout_secs: float | None) -> bool:
        """Return whether the tier has the checkpoint, or a later one.

        Raises:
            CheckpointDamagedError, StorageError: The tier cannot be read.
            TimeoutError: It has not answered in that time.
        """
        if not self._has_ended.wait(max(0.0, timeout_secs) if timeout_secs is not None else None):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._is_there

    def _look(self) -> None:
        try:
            is_there = is_committed(self._remote, self._wanted)
            self._is_there = is_there or _is_passed(self._remote, self._wanted)
        except HoldfastError as error:
            self._error = error
        finally:
            self._has_ended.set()


def _is_passed(remote: DurableStore, wanted: CheckpointId) -> bool:
    newest = newest_of_timeline(remote)
    return newest is not None and (newest.attempt, newest.step) > (wanted.attempt, wanted.step)
