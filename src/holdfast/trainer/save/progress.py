"""Track the accepted saves that have not ended, and raise the failures of those that have.

A save for RAM alone has ended for the training once it is sealed. Until all hosts together protect
it, it may still be dropped, which is a failure as for any other save (`trainer.save.drops`). The
calls that end the training wait for that protection, until none was reported for `CONFIRM_SECS`.

Shared by the training thread, the saver and the watcher; one lock guards all of it.

See docs/decisions/0053.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from holdfast import waits
from holdfast.clock import Clock
from holdfast.conditions import Condition
from holdfast.engine.lifecycle.commit import NOTHING_SAVED
from holdfast.errors import FencedError, HoldfastError, StorageError, WaitTimeoutError
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.host.wire.protocol import WATCHED_MAX, Notice, PartTier, Sealed
from holdfast.trainer.save.drops import Drops
from holdfast.trainer.save.failures import STEPS_SHOWN_MAX, Failures

SEALED_MAX = 256
"""How many of the newest sealed saves for RAM alone are tracked: more than any host holds."""
CONFIRM_SECS = 60.0
"""How long the end of saving waits for the next confirmation of what is in RAM alone."""

PRESERVED_SECS = 10.0
"""How long a wait includes preservation, which a user's policy may block."""
PRESERVED_MAX = 64
"""How many commits may be reported after the end of their preservation."""

STOPPED_BY: dict[str, type[HoldfastError]] = {"fenced": FencedError, "lost": StorageError}
"""The errors of the notices that end all saving: another attempt, or a removed directory."""

WATCH_SECS = 1.0
LOG_SECS = 10.0
"""How often a wait logs what it waits for."""

log = logging.getLogger(__name__)


class Reach(Enum):
    """Which saves count as in progress, and until when."""

    SEALED = 0
    """All saves, until their parts are sealed."""
    DURABLE = 1
    """The saves for the durable tier, until they are durable."""
    FINISHED = 2
    """All saves, until they have ended."""


class SavesInFlight(NamedTuple):
    """The saves of one reach.

    Attributes:
        accepted_count: How many were accepted so far.
        is_going_on: Whether one is in progress.
        ended_secs: When the last one ended, by the monotonic clock; `-inf`: none has ended.
    """

    accepted_count: int
    is_going_on: bool
    ended_secs: float


@dataclass(slots=True)
class _Save:
    is_durable_due: bool
    is_by_step: bool
    sealed: Sealed | None = None
    is_reported: bool = False
    """The agent has accepted the sealed part."""


class Progress:
    """The state of each accepted save.

    Args:
        clock: The time.
        warns: Log the failures of saves, instead of raising them at the next call.
    """

    def __init__(self, clock: Clock, *, warns: bool = False) -> None:
        self._clock = clock
        self._drops = Drops()
        self._failures = Failures(warns=warns)
        self._sealed: dict[CheckpointId, _Save] = {}
        self._changed = Condition()
        self._saves: dict[CheckpointId, _Save] = {}
        self._last = dict[bool, CheckpointId]()
        """The newest accepted save, and by True the newest one for the durable tier."""
        self._accepted_count = 0
        self._durable_count = 0
        self._ended_secs = dict.fromkeys(Reach, -math.inf)
        """When the last save of each reach ended."""
        self.raised_at: int | None = None
        """The step that was saved by a call that then raised an earlier failure, until the call is
        repeated."""
        self._is_stopped = False
        self._committed: CheckpointId | None = None
        """The newest checkpoint that was reported as committed, until it is deleted."""
        self._undurable: CheckpointId | None = None
        """The last checkpoint that could not be made durable."""
        self._unpreserved: set[CheckpointId] = set()
        self._preserved: deque[CheckpointId] = deque(maxlen=PRESERVED_MAX)
        self._upload_count = 0
        self.describe_parts: Callable[[CheckpointId], str] = lambda checkpoint: ""
        """Returns, as text, whose parts of a checkpoint are missing; set by the training thread."""

    @property
    def is_stopped(self) -> bool:
        """Whether all saving has ended: the attempt was fenced, or the run is gone."""
        return self._is_stopped

    @property
    def has_failed(self) -> bool:
        """Whether `raise_failure` would raise now; read at every step."""
        # A drop becomes a failure as time passes, even if no agent answers.
        due_at_secs = self._drops.due_at_secs
        is_late = due_at_secs != math.inf and self._clock.monotonic() >= due_at_secs
        return bool(self._failures) or is_late

    def accept(self, checkpoint: CheckpointId, *, durable: bool, by_step: bool) -> None:
        """Add an accepted save.

        Args:
            checkpoint: The checkpoint.
            durable: The save is for the durable tier.
            by_step: The save is for exactly this step: if dropped, it fails whatever follows it.
        """
        with self._changed:
            self._saves[checkpoint] = _Save(durable, by_step)
            for is_durable in {False, durable}:
                newest = self._last.get(is_durable, checkpoint)
                self._last[is_durable] = max(checkpoint, newest, key=lambda each: each.age)
            self._accepted_count += 1
            self._durable_count += durable

    def require(self, checkpoint: CheckpointId) -> None:
        """Make the drop of an accepted save a failure whatever follows it."""
        with self._changed:
            save = self._saves.get(checkpoint) or self._sealed.get(checkpoint)
            if save is not None:
                save.is_by_step = True

    def seal(self, checkpoint: CheckpointId, message: Sealed) -> None:
        """Record that the part is sealed; a save for RAM alone has ended with that.

        Args:
            checkpoint: The checkpoint.
            message: The report to the agent, kept in order to repeat it to a new one.
        """
        with self._changed:
            save = self._saves.get(checkpoint)
            if save is not None:
                save.sealed = message
                self._ended_secs[Reach.SEALED] = self._clock.monotonic()
                if not save.is_durable_due:
                    self._ended_secs[Reach.FINISHED] = self._clock.monotonic()
                    self._sealed[checkpoint] = self._saves.pop(checkpoint)
                    while len(self._sealed) > SEALED_MAX:
                        del self._sealed[next(iter(self._sealed))]
            self._changed.notify_all()

    def reported(self, checkpoint: CheckpointId) -> None:
        """Record that the agent has accepted the sealed part."""
        with self._changed:
            save = self._saves.get(checkpoint) or self._sealed.get(checkpoint)
            if save is not None:
                save.is_reported = True

    def pending(self) -> tuple[CheckpointId, ...]:
        """Return the oldest saves that were reported to the agent and have not ended."""
        with self._changed:
            saves = [*self._saves.items(), *self._sealed.items()]
            reported = [c for c, save in saves if save.is_reported]
            return tuple(reported[:WATCHED_MAX])

    def sealed_part(self, checkpoint: CheckpointId) -> Sealed | None:
        """Return the report of a sealed save; None if the save has ended or is not sealed."""
        with self._changed:
            save = self._saves.get(checkpoint)
            return save.sealed if save is not None else None

    def finish(self, checkpoint: CheckpointId) -> None:
        """Remove a save that is durable, or that ended without a loss."""
        with self._changed:
            save = self._remove(checkpoint)
            if save is not None:
                self._failures.has_succeeded()
            self._changed.notify_all()

    def _remove(self, checkpoint: CheckpointId) -> _Save | None:
        """Remove a save that has ended; None if it is not tracked."""
        save = self._saves.pop(checkpoint, None)
        if save is None:
            return self._sealed.pop(checkpoint, None)
        for reach in Reach:
            if self._counts(save, reach):
                self._ended_secs[reach] = self._clock.monotonic()
        return save

    @staticmethod
    def _counts(save: _Save, reach: Reach) -> bool:
        """Return whether a save that has not ended is in progress for that reach."""
        if reach is Reach.SEALED:
            return save.sealed is None
        return save.is_durable_due or reach is Reach.FINISHED

    def _await_preservation(self, checkpoint: CheckpointId) -> None:
        """Expect this host's agent, which has committed it, to report its preservation."""
        with self._changed:
            if checkpoint not in self._preserved:
                self._unpreserved.add(checkpoint)

    def _preservation_ended(self, checkpoint: CheckpointId) -> None:
        """Record that preservation was applied after that commit, or has failed."""
        with self._changed:
            self._preserved.append(checkpoint)
            self._unpreserved.discard(checkpoint)
            self._changed.notify_all()

    def forget_preservation(self) -> None:
        """Stop waiting for preservation: the agent that would report it has ended."""
        with self._changed:
            self._unpreserved.clear()
            self._changed.notify_all()

    def notice(self, notice: Notice) -> None:
        """Apply a notice: the agent's report on a save, or that no agent can be reached."""
        if notice.kind == "unavailable":
            self.fail_all(notice.reason)
        if notice.id is None:
            return
        checkpoint = notice.id
        match notice.kind:
            case "failed":
                self.fail_save(checkpoint, notice.reason)
            case "dropped":
                self.drop(checkpoint, notice.reason)
            case "uploaded":
                with self._changed:
                    self._upload_count += 1
                    self._changed.notify_all()
            case "preserved":
                self._preservation_ended(checkpoint)
            case "protected":
                self._secured(checkpoint, is_committed=False)
            case "committed":
                if notice.data is not None:
                    self._await_preservation(checkpoint)
                self._secured(checkpoint, is_committed=True)
                self.finish(checkpoint)
                self._note_committed(checkpoint)
            case "deleted":
                self.note_deleted(checkpoint)
                self.finish(checkpoint)
            case "left behind":
                self.finish(checkpoint)

    def _secured(self, checkpoint: CheckpointId, *, is_committed: bool) -> None:
        """Record that it is protected or committed; it replaces older ones that were dropped."""
        with self._changed:
            self._drops.secured(checkpoint, is_committed=is_committed)
            self._sealed.pop(checkpoint, None)
            self._changed.notify_all()

    def drop(self, checkpoint: CheckpointId, reason: str) -> None:
        """End a dropped save, which fails unless a newer checkpoint replaces it in time."""
        with self._changed:
            save = self._remove(checkpoint)
            if save is not None:
                self._failures.log_drop(checkpoint, reason, is_by_step=save.is_by_step)
                self._drops.add_drop(
                    checkpoint,
                    reason,
                    self._clock.monotonic(),
                    is_durable=save.is_durable_due,
                    is_by_step=save.is_by_step,
                )
            self._changed.notify_all()

    def fail_save(self, checkpoint: CheckpointId, reason: str) -> None:
        """End a failed save; `raise_failure` reports it once. An unknown save is ignored."""
        with self._changed:
            save = self._saves.get(checkpoint)
            if save is not None and save.is_durable_due:
                self._undurable = checkpoint
            sealed = save.sealed if save is not None else None
            is_in_ram = sealed is not None and sealed.tier is PartTier.RAM
            if is_in_ram and not reason.endswith(NOTHING_SAVED):
                reason += (
                    "; this host's part of it is in RAM until a newer checkpoint takes its room, "
                    "and the agent tries again"
                )
        self._fail_save(checkpoint, reason, "the checkpoint was not made", "is not saved")

    def fail_unconfirmed(self, checkpoint: CheckpointId, reason: str) -> None:
        """End a save whose outcome is unknown, as a failure: the agent does not answer.

        If the part is sealed, the agent may still commit the checkpoint when it continues.
        """
        outcome = (
            "not confirmed: the checkpoint may become durable when the agent continues, and "
            "`holdfast ls` shows whether it is"
        )
        self._fail_save(checkpoint, reason, outcome, "is not confirmed")

    def _fail_save(self, checkpoint: CheckpointId, reason: str, outcome: str, brief: str) -> None:
        with self._changed:
            if self._remove(checkpoint) is not None:
                self._failures.add_failed(checkpoint, reason, outcome, brief)
            self._changed.notify_all()

    def fail_all(self, reason: str) -> None:
        """Fail every pending save as not confirmed: the agent is unreachable."""
        self.forget_preservation()
        with self._changed:
            waiting = list(self._saves)
            self._sealed.clear()
        for checkpoint in waiting:
            self.fail_unconfirmed(checkpoint, reason)

    def report_error(self, error: HoldfastError) -> None:
        """Queue an error unrelated to a save; ignore a duplicate of a queued one."""
        with self._changed:
            self._failures.add_once(error)

    def stop_saving(self, error: HoldfastError) -> None:
        """End all saving with `error`, which is raised once; waits for accepted saves end.

        A save that was accepted after that, by an earlier answer of the agent, has ended with the
        error too: it is raised once more.
        """
        with self._changed:
            is_news = not self._is_stopped or bool(self._saves or self._sealed)
            self._saves.clear()
            self._sealed.clear()
            self._drops.remove_all()
            self._unpreserved.clear()
            if is_news:
                self._is_stopped = True
                self._failures.add(error)
            self._changed.notify_all()

    @contextlib.contextmanager
    def stopped_by(self, kind: type[HoldfastError]) -> Iterator[None]:
        """End all saving if an error of class `kind` leaves the block; see `stop_saving`."""
        try:
            yield
        except kind as error:
            self.stop_saving(error)
            self.raise_failure()
            raise

    @contextlib.contextmanager
    def drops_raised_after(self, step: int) -> Iterator[None]:
        """Raise the failure of dropped saves after the block, in which `step` is saved.

        The order matters: if `step` were not saved, the other ranks' parts of it would be dropped
        in turn.

        Raises:
            SaveFailedError: Accepted saves were dropped, and failures are raised.
        """
        with self._changed:
            now_secs, error = self._clock.monotonic(), None
            if now_secs >= self._drops.due_at_secs:
                error = self._drops.take_failure(now_secs, self._in_progress(), is_final=False)
            if error is not None:
                error = self._failures.add_dropped(error)
        is_saved = False
        try:
            yield
            is_saved = True
        finally:
            if error is not None and not is_saved:
                # Another error leaves the block; the next call raises this one.
                self.report_error(error)
        if error is not None:
            self.raised_at = step
            raise error

    def raise_failure(self, saved_step: int | None = None) -> None:
        """Raise the oldest failure that was not raised yet, as one error for all failed saves.

        Args:
            saved_step: The step of the call that raises it, if that step was saved before.

        Raises:
            SaveFailedError: Background saves failed.
            HoldfastError: Another queued error.
        """
        # Looked at without the lock: the next call raises an error that is queued meanwhile.
        if not self._failures:
            return
        with self._changed:
            if self._failures:
                error = self._failures.take()
                if saved_step is not None:
                    self.raised_at = saved_step
                raise error

    def _raise_at_end(self, timeout_secs: float, watch: Callable[[], None]) -> None:
        """Raise the oldest failure; a drop that is not replaced by now is one.

        The call first waits until all hosts have confirmed the checkpoints in RAM alone. If none is
        confirmed for `CONFIRM_SECS`, the others count as dropped: slower ranks that still come to
        them extend the wait. When `timeout_secs` have passed, they stay undecided.

        Raises:
            SaveFailedError: Background saves failed.
        """
        unconfirmed = self._await_confirmations(timeout_secs, watch)
        missing = self.describe_parts(max(unconfirmed)) if unconfirmed else ""
        for checkpoint in unconfirmed:
            reason = f"other hosts did not confirm it within {CONFIRM_SECS:.0f} s"
            self.drop(checkpoint, f"{reason}: {missing}" if missing else reason)
        with self._changed:
            dropped = self._drops.take_failure(self._clock.monotonic(), {}, is_final=True)
            self._failures.end(dropped, is_last_safe=self._is_last_safe())
        self.raise_failure()

    def _is_last_safe(self) -> bool:
        """Return whether the last save, and the last one for the durable tier, is secured."""
        return all(
            self._drops.is_secured(checkpoint, is_durable=is_durable)
            for is_durable, checkpoint in self._last.items()
        )

    def newest_parts_text(self) -> str:
        """Return, as text, whose parts of the newest save in progress are missing."""
        with self._changed:
            newest = max(self._saves, default=None)
        return "" if newest is None else self.describe_parts(newest)

    def _await_confirmations(
        self, timeout_secs: float, watch: Callable[[], None]
    ) -> list[CheckpointId]:
        """Return the checkpoints in RAM alone that nothing was reported of for `CONFIRM_SECS`."""
        until_secs = self._clock.monotonic() + timeout_secs
        left_count, late_at_secs = math.inf, math.inf
        while True:
            now_secs = self._clock.monotonic()
            with self._changed:
                if len(self._sealed) < left_count:
                    left_count, late_at_secs = len(self._sealed), now_secs + CONFIRM_SECS
                if not self._sealed or now_secs >= until_secs:
                    return []
                if now_secs >= late_at_secs:
                    return list(self._sealed)
                secs = min(WATCH_SECS, until_secs - now_secs, late_at_secs - now_secs)
                self._await_fewer(len(self._sealed), secs)
            watch()

    def _await_fewer(self, count: int, secs: float) -> None:
        waits.wait_for(self._changed, lambda: len(self._sealed) < count, secs)

    def newest_text(self) -> str:
        """Return, as text for users, the newest checkpoint that this rank knows to be safe."""
        with self._changed:
            return self._drops.newest_text(is_durable=False)

    def _in_progress(self) -> dict[CheckpointId, bool]:
        """Return the saves in progress, each with whether it is for the durable tier."""
        saves = (*self._saves.items(), *self._sealed.items())
        return {checkpoint: save.is_durable_due for checkpoint, save in saves}

    def outstanding(self) -> int:
        """Return how many saves for the durable tier are in progress."""
        with self._changed:
            return sum(save.is_durable_due for save in self._saves.values())

    def saving(self, reach: Reach) -> SavesInFlight:
        """Return the saves of that reach."""
        with self._changed:
            count = self._durable_count if reach is Reach.DURABLE else self._accepted_count
            is_going_on = any(self._counts(save, reach) for save in self._saves.values())
            return SavesInFlight(count, is_going_on, self._ended_secs[reach])

    def is_becoming_durable(self, checkpoint: CheckpointId) -> bool:
        """Return whether a save of it for the durable tier is in progress."""
        with self._changed:
            save = self._saves.get(checkpoint)
            return save is not None and save.is_durable_due

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        """Return whether it is the newest one that was reported as committed."""
        with self._changed:
            return checkpoint == self._committed

    def is_undurable(self, checkpoint: CheckpointId) -> bool:
        """Return whether it is the last one that could not be made durable."""
        with self._changed:
            return checkpoint == self._undurable

    def note_deleted(self, checkpoint: CheckpointId) -> None:
        """Record that a checkpoint was deleted."""
        with self._changed:
            if checkpoint == self._committed:
                self._committed = None

    def _note_committed(self, checkpoint: CheckpointId) -> None:
        with self._changed:
            newest = self._committed
            if newest is None or newest.age < checkpoint.age:
                self._committed = checkpoint

    def steps(self) -> set[int]:
        """Return the steps whose saves are in progress."""
        with self._changed:
            return {checkpoint.step for checkpoint in self._saves}

    def sealed_again(self) -> list[Sealed]:
        """Return the reports of sealed saves in progress, to repeat them to a new agent."""
        with self._changed:
            return [save.sealed for save in self._saves.values() if save.sealed is not None]

    def unfinished_steps(self) -> list[int]:
        """Return the steps of all saves that have not ended, also of those for RAM alone."""
        with self._changed:
            return sorted({checkpoint.step for checkpoint in (*self._saves, *self._sealed)})

    def newest_safe(self, attempt: AttemptId) -> int | None:
        """Return the newest step that is secured in an attempt; None if there is none."""
        with self._changed:
            return self._drops.newest_secured(attempt)

    def wait_finished(
        self, timeout_secs: float | None, watch: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until all saves have ended, logging those in progress.

        Args:
            timeout_secs: The longest wait; None: no limit.
            watch: Called every `WATCH_SECS`; an error that it raises ends the wait.

        Returns:
            Whether all have ended; False if the timeout has passed.
        """
        began_secs = self._clock.monotonic()
        until_secs = math.inf if timeout_secs is None else began_secs + timeout_secs
        log_at_secs = began_secs + LOG_SECS
        while True:
            now_secs = self._clock.monotonic()
            secs = max(0.0, min(WATCH_SECS, until_secs - now_secs))
            if self.wait(lambda sealed, finished: finished, secs):
                return True
            if now_secs >= until_secs:
                return False
            watch()
            if now_secs >= log_at_secs:
                log_at_secs += LOG_SECS
                shown, waited_secs = sorted(self.steps())[:STEPS_SHOWN_MAX], now_secs - began_secs
                log.info("waiting for steps %s to be durable: %.0f s so far", shown, waited_secs)

    def wait(self, is_over: Callable[[bool, bool], bool], timeout_secs: float | None) -> bool:
        """Wait until `is_over(all_sealed, all_ended)` returns True.

        Returns:
            Whether it did; False if the timeout has passed.
        """

        def has_ended() -> bool:
            unsealed = any(save.sealed is None for save in self._saves.values())
            return is_over(not unsealed, not self._saves)

        with self._changed:
            return waits.wait_for(self._changed, has_ended, timeout_secs)

    @property
    def upload_count(self) -> int:
        """How many checkpoints were reported as being in the remote tier."""
        with self._changed:
            return self._upload_count

    def wait_uploaded(self, seen_count: int, timeout_secs: float) -> None:
        """Wait until more than `seen_count` checkpoints were reported there, or the timeout."""
        with self._changed:
            waits.wait_for(self._changed, lambda: self._upload_count > seen_count, timeout_secs)

    def wait_until_finished(
        self, timeout_secs: float | None, watch: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until all saves have ended, then up to `PRESERVED_SECS` for preservation.

        Args:
            timeout_secs: The longest wait; None: no limit.
            watch: As for `wait_finished`.

        Raises:
            SaveFailedError: A save failed.
            WaitTimeoutError: The timeout has passed; saving continues.
        """
        started_secs = self._clock.monotonic()
        if not self.wait_finished(timeout_secs, watch):
            steps = sorted(self.steps())
            texts = (
                f"wait until finished: steps {steps[:10]} are not durable after {timeout_secs} s",
                self.newest_parts_text(),
                f"saving continues; {self.newest_text()}",
            )
            raise WaitTimeoutError("; ".join(filter(None, texts)))

        def left_secs() -> float:
            waited_secs = self._clock.monotonic() - started_secs
            return math.inf if timeout_secs is None else max(0.0, timeout_secs - waited_secs)

        with self._changed:
            # The result does not matter: the saves are durable in any case.
            secs = min(PRESERVED_SECS, left_secs())
            waits.wait_for(self._changed, lambda: not self._unpreserved, secs)
        self._raise_at_end(left_secs(), watch)
