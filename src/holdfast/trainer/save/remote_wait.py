"""Wait until the remote tier has a run's newest durable checkpoint.

Each process looks at the tiers itself, so that no agent has to answer for another one. A look has a
thread of its own: a service that does not answer must not hold a caller beyond its timeout.
"""

from __future__ import annotations

import math

from holdfast import waits
from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.commit import is_committed
from holdfast.engine.lifecycle.newest import newest_committed
from holdfast.errors import CheckpointDamagedError, StorageError, WaitTimeoutError
from holdfast.format.names import CheckpointId
from holdfast.host.tiers.daemon_threads import begin_call
from holdfast.host.wire import protocol
from holdfast.store.durable import DurableStore
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.opening import OpenRun

LOOK_SECS_MIN = 1.0
"""How long a look may take also where less time is left, so that a timeout of 0 looks once."""
POLL_SECS_MIN, POLL_SECS_MAX = 1.0, 15.0
"""A look at a tier that lacks the checkpoint takes requests, so the pauses grow meanwhile."""


def newest_of_timeline(durable: DurableStore) -> CheckpointId | None:
    """Return the newest checkpoint that a durable tier has; None if there is none.

    Raises:
        CheckpointDamagedError, StorageError: the tier cannot be read.
    """
    return newest_committed(durable, read_attempts(durable))


def wait_for_newest(
    session: AgentSession, run: OpenRun, timeout_secs: float | None, clock: Clock
) -> None:
    """Have the newest durable checkpoint copied to the remote tier, and wait for that.

    Raises:
        WaitTimeoutError: the timeout has passed; the agents go on.
        CheckpointDamagedError, StorageError: the durable tier cannot be read.
    """
    newest = newest_of_timeline(run.durable)
    if newest is not None and run.remote is not None:
        session.call("upload", protocol.Empty(), protocol.Empty)
        wait_for_upload(run.remote, newest, timeout_secs, clock)


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
        look_secs = math.inf
        if until_secs is not None:
            look_secs = max(until_secs - clock.monotonic(), LOOK_SECS_MIN)
        try:
            if waits.result(begin_call(lambda: _is_there(remote, wanted)), look_secs):
                return
        except (CheckpointDamagedError, StorageError) as error:
            problem = str(error)
        except TimeoutError:
            problem = "it does not answer"
        left_secs = until_secs - clock.monotonic() if until_secs is not None else POLL_SECS_MAX
        if left_secs <= 0:
            raise WaitTimeoutError(
                f"wait for step {wanted.step} in the remote tier {remote.home.location_text}: it "
                f"is not there after {round(timeout_secs or 0, 1):g} s ({problem}); the agents go "
                "on, see `holdfast status`"
            )
        waits.sleep(clock, min(pause_secs, left_secs))
        pause_secs = min(1.5 * pause_secs, POLL_SECS_MAX)


def _is_there(remote: DurableStore, wanted: CheckpointId) -> bool:
    """Return whether the tier has the checkpoint, or a later one of the timeline."""
    if is_committed(remote, wanted):
        return True
    newest = newest_of_timeline(remote)
    return newest is not None and (newest.attempt, newest.step) > (wanted.attempt, wanted.step)
