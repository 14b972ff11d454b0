"""Decide how long the calls of one manager wait, and report what is unfinished when they end early.

A wait ends early for one of three reasons:

- A signal arrived during it (`holdfast.waits`). The launcher wants the process to leave, so later
  waits of the manager are short too.
- The manager is closed after an error, and a host of the job sends nothing: what waits for its part
  may never end. The error is usually that of a collective, and may come before any agent knows that
  a host is lost. So such a close waits for parts of other hosts only while all hosts are heard.
- The hosts could not agree where to stop for a preemption.

In none of these cases is anything lost that is sealed: the agent continues with it.

See docs/decisions/0041 and docs/decisions/0044.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator

from holdfast import waits
from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.newest import newest_committed
from holdfast.errors import (
    HoldfastError,
    SaveFailedError,
    WaitInterruptedError,
    WaitTimeoutError,
)
from holdfast.host.wire.protocol import Empty, EventReport, QuietHosts, Upload, Uploaded
from holdfast.observe.events.schema import SHOWN_MAX, LeftUnfinished
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.opening import OpenRun
from holdfast.trainer.save.drops import MAY_CONTINUE
from holdfast.trainer.save.failures import SAVES_CONTINUE, STEPS_SHOWN_MAX
from holdfast.trainer.save.progress import Progress
from holdfast.trainer.save.save_schedule import SaveSchedule

CLOSE_SECS = 3600.0
"""How long `close` waits until all accepted saves are durable."""
CUT_CLOSE_SECS = 5.0
"""The same after a preemption for which the hosts did not agree on a step; see `AGREE_SECS`.

Hosts that are cut off from each other find each other's parts in storage two heartbeats after they
began to miss them, so a small state is committed by then.
"""
ERROR_CLOSE_SECS = 5.0
"""How long `close` waits after an error for what may need a part of a host that sends nothing.

By then an agent knows of a host that was lost just before, in jobs of up to 200 hosts: see
`Settings.quiet_secs`.
"""
LEAVE_SECS = 1.0
"""How long each call waits after a signal has ended another one."""
LOOK_SECS = 1.0
"""How long an agent has to learn what is in the remote tier, also with a timeout of 0."""
SEAL_SECS = 60.0
"""How long a process that leaves after an error waits for the seals of its own saves."""
ASK_SECS = 5.0
"""How often it is asked again whether the newest checkpoint is there."""
SAVE_PATIENCE_SECS = 10.0
"""How much longer a call of `save` waits after a signal: a preemption needs its checkpoint."""

log = logging.getLogger(__name__)


class HostWatch:
    """End the close after an error if a host is quiet and nothing here ends without it.

    What this host's agent writes of a complete checkpoint is awaited.

    Args:
        ask: Asks the agent; None: it does not answer.
        unfinished: Returns what has not ended, for the message.
        clock: The clock.
    """

    def __init__(
        self, ask: Callable[[], QuietHosts | None], unfinished: Callable[[], str], clock: Clock
    ) -> None:
        self._ask = ask
        self._unfinished = unfinished
        self._clock = clock
        self._until_secs = clock.monotonic() + ERROR_CLOSE_SECS

    def check(self) -> None:
        """Ask the agent, once `ERROR_CLOSE_SECS` have passed.

        Raises:
            WaitTimeoutError: A host sends nothing, and no complete checkpoint is written here.
        """
        if self._clock.monotonic() < self._until_secs:
            return
        quiet = self._ask()
        if quiet is not None and quiet.hosts and not quiet.is_writing:
            plural = "" if len(quiet.hosts) == 1 else "s"
            raise WaitTimeoutError(
                f"close: not waiting for host{plural} {', '.join(quiet.hosts)}, of which nothing "
                f"is heard: {self._unfinished()}"
            )


class Patience:
    """How long the calls of one manager wait. Owned by the training thread."""

    def __init__(
        self,
        session: AgentSession,
        progress: Progress,
        steps: SaveSchedule,
        clock: Clock,
        *,
        host_count: int,
    ) -> None:
        self._session = session
        self._progress = progress
        self._steps = steps
        self._clock = clock
        self._host_count = host_count
        self._is_leaving = False

    @contextlib.contextmanager
    def of(self, call: str, patience_secs: float = waits.PATIENCE_SECS) -> Iterator[None]:
        """Let a signal end the waits in the block, and shorten the later ones.

        The block is published as a call of the manager, which has bounds of its own: no hang.

        Args:
            call: The manager's call, for messages.
            patience_secs: How much longer they last after the signal.
        """
        outer_ns = 0
        if not self._session.is_closed:
            now_ns = int(self._clock.monotonic() * 1e9)
            outer_ns = self._session.place.publish_call(now_ns)
        try:
            with waits.ended_by_signals(call, self.unfinished_text, patience_secs):
                yield
        except WaitInterruptedError:
            self._is_leaving = True
            raise
        finally:
            # After an interrupted `close` the cells may be unmapped.
            if not self._session.is_closed:
                self._session.place.publish_call(outer_ns)

    @contextlib.contextmanager
    def blocking(self, call: str, patience_secs: float = waits.PATIENCE_SECS) -> Iterator[float]:
        """As `of`, for a block that keeps the training from its next step, which is published.

        Yields:
            When the block began, by the monotonic clock.
        """
        began_secs = self._clock.monotonic()
        if not self._session.is_closed:
            self._session.place.begin_blocked()
        try:
            with self.of(call, patience_secs):
                yield began_secs
        finally:
            # After an interrupted `close` the cells may be unmapped.
            if not self._session.is_closed:
                self._session.place.add_blocked(self._clock.monotonic() - began_secs)

    def limit_secs(self, timeout_secs: float | None) -> float | None:
        """Return the timeout of a wait for all saves; None: none.

        Args:
            timeout_secs: That of the call, without a signal and a cut.
        """
        if self._is_leaving:
            return LEAVE_SECS
        return CUT_CLOSE_SECS if self._steps.stop.is_unconfirmed else timeout_secs

    def await_sealed(self) -> None:
        """Wait until all accepted saves are sealed, because other ranks may save nothing more.

        The agents make durable what becomes whole.

        Raises:
            WaitTimeoutError: They are not sealed after `SEAL_SECS`.
        """
        if not self._progress.wait(lambda sealed, finished: sealed, SEAL_SECS):
            raise WaitTimeoutError(
                f"close: not sealed in RAM within {SEAL_SECS:.0f} s: {self.unfinished_text()}"
            )

    def await_end(self, *, is_after_error: bool) -> None:
        """Wait until all accepted saves have ended, because the manager is closed.

        Raises:
            SaveFailedError: A save failed.
            WaitTimeoutError: The time has passed, or another host is quiet.
            WaitInterruptedError: A signal has ended the wait.
        """
        watch = HostWatch(self._ask_quiet, self.unfinished_text, self._clock)
        is_watching = is_after_error and self._host_count > 1
        try:
            self._progress.wait_until_finished(
                self.limit_secs(CLOSE_SECS), watch.check if is_watching else lambda: None
            )
        except SaveFailedError as error:
            # No step follows.
            text = str(error).replace(SAVES_CONTINUE, "").replace(MAY_CONTINUE, "")
            raise SaveFailedError(error.step, text, error.steps) from error.__cause__
        except (WaitTimeoutError, WaitInterruptedError) as error:
            self._report(error)
            raise

    def await_upload(self, run: OpenRun, timeout_secs: float | None) -> None:
        """Have the newest durable checkpoint copied to the remote tier, and wait for that.

        The agent knows whether it is there. Each notice of a copy is a reason to ask it, and it is
        asked every `ASK_SECS` besides: another agent may have taken its place.

        Raises:
            WaitTimeoutError: The timeout has passed; the agents go on.
            AgentUnavailableError: No agent answers.
            CheckpointDamagedError, StorageError: The durable tier cannot be read.
        """
        newest = newest_committed(run.durable, read_attempts(run.durable))
        if newest is None or run.remote is None:
            return
        secs = math.inf if timeout_secs is None else max(timeout_secs, LOOK_SECS)
        until_secs = self._clock.monotonic() + secs
        while True:
            seen_count = self._progress.upload_count
            answer = self._session.call("upload", Upload(id=newest), Uploaded)
            left_secs = until_secs - self._clock.monotonic()
            if answer.is_there:
                return
            if left_secs <= 0:
                problem = answer.problem or "it is being copied, or waits for that"
                raise WaitTimeoutError(
                    f"wait for step {newest.step} in the remote tier "
                    f"{run.remote.home.location_text}: it is not there after "
                    f"{round(timeout_secs or 0, 1):g} s ({problem}); the agents go on, see "
                    "`holdfast status`"
                )
            self._progress.wait_uploaded(seen_count, min(left_secs, ASK_SECS))

    def unfinished_text(self) -> str:
        """Return, as text for users, what has not ended and where the next start continues."""
        steps, newest = self._progress.unfinished_steps(), self._newest_step()
        named = ", ".join(map(str, steps[:STEPS_SHOWN_MAX]))
        more = f" and {len(steps) - STEPS_SHOWN_MAX} more" * (len(steps) > STEPS_SHOWN_MAX)
        start = "begins anew" if newest is None else f"continues from step {newest}"
        if not steps:
            return f"no accepted save is in progress; the next start {start}, or from a later step"
        return (
            f"step{'' if len(steps) == 1 else 's'} {named}{more} may not be safe yet. This host's "
            "agent keeps what is sealed in RAM and makes durable what becomes whole; without that, "
            f"the next start {start}"
        )

    def _newest_step(self) -> int | None:
        newest = self._progress.newest_safe(self._session.place.attempt)
        if newest is None and self._steps.floor >= 0:
            newest = self._steps.floor
        return newest

    def _ask_quiet(self) -> QuietHosts | None:
        return self._session.ask_briefly("quiet", Empty(), QuietHosts)

    def _report(self, error: HoldfastError) -> None:
        event = LeftUnfinished(
            rank=self._session.rank,
            steps=tuple(self._progress.unfinished_steps()[:SHOWN_MAX]),
            newest_step=self._newest_step(),
            reason=str(error),
        )
        self._session.ask_briefly("report", EventReport(event=event), Empty)
