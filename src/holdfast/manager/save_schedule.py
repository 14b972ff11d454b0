"""Where the training is, what it has saved, and what is due at a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.agent.control_block import (
    NEVER,
    PREEMPTION_CONFIRMED,
    TARGET_DURABLE,
    TARGET_PREEMPTION,
    TARGET_RAM,
)
from holdfast.clock import Clock, SystemClock
from holdfast.format.names import STEP_MAX
from holdfast.job.options import Options
from holdfast.policy.contexts import SaveContext
from holdfast.policy.save_decision_policy import SaveDecisionPolicy, split

CONFIRM_SECS = 30.0
CONFIRM_POLL_SECS = 0.002
UNASKED_STEPS = 3
UNASKED_SECS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is due.

    `must_save`: taken whatever waits. `is_target`: a later step will do too, for what is due by a
    target. `may_wait`: so it will for all that is due, and no other rank meets this one at it.
    `is_by_step`: the caller or a policy wants this very step, or a preemption of this rank alone.
    """

    durable: bool
    ram: bool
    must_save: bool
    is_target: bool
    may_wait: bool
    is_by_step: bool
    is_preemption: bool

    @property
    def is_any(self) -> bool:
        """Whether a checkpoint is due in any tier."""
        return self.durable or self.ram


class SaveSchedule:
    """Owned by the training thread."""

    def __init__(
        self, origin: tuple[int, int] | None, options: Options, process_count: int
    ) -> None:
        self._is_alone = process_count == 1
        self.floor = self.last = origin[0] if origin is not None else -1
        self.step_max = STEP_MAX
        self.accepted: set[int] = set()
        self.preempted_at: int | None = None
        self.read: int | None = None
        """The step that a restore has read since the last save, without going back to it."""
        self.has_asked_preemption = False
        self._unasked_count = 0
        self._unasked_since_secs = 0.0
        self._served = {TARGET_DURABLE: NEVER, TARGET_RAM: NEVER}
        self._durable = split(options.save).by_step
        ram = options.ram.save_decision_policy if options.ram is not None else None
        self._ram = split(ram).by_step if ram is not None else None
        self._has_told_skipped = False
        # Policies that depend on the step alone are asked at every step; they look at nothing else.
        self._context = SaveContext(
            now=SystemClock().now(), is_saving_in_progress=False, reached_preemption=False
        )

    def is_due_by_step(self, step: int) -> bool:
        """Whether a policy that depends on the step alone wants this step."""
        return self._asks(self._durable, step) or self._asks(self._ram, step)

    def is_asked_again(self, step: int, raised_at: int | None) -> bool:
        """Whether the last call of `save` was for `step` too, and raised an earlier failure.

        `raised_at` is the step at which drops were raised, and which was saved all the same.
        """
        is_saved = step in self.accepted and step != raised_at
        return step == self.last and step > self.floor and not is_saved

    def due(self, step: int, cells: Sequence[int], told_alone: bool, force: bool) -> Due:
        """What is due at `step`."""
        is_preemption = self.preempted_at is None and (
            told_alone or step >= cells[TARGET_PREEMPTION]
        )
        durable_target = self._is_target(TARGET_DURABLE, step, cells)
        ram_target = self._is_target(TARGET_RAM, step, cells)
        durable_step, ram_step = self._asks(self._durable, step), self._asks(self._ram, step)
        must_save, is_target = force or is_preemption, durable_target or ram_target
        return Due(
            durable=must_save or durable_target or durable_step,
            ram=ram_target or ram_step,
            must_save=must_save,
            is_target=is_target,
            may_wait=self._is_alone and is_target and not (must_save or durable_step or ram_step),
            is_by_step=force or told_alone or durable_step or ram_step,
            is_preemption=is_preemption,
        )

    def note_taken(self, step: int, due: Due, cells: Sequence[int]) -> None:
        """Notes that a checkpoint of `step` is being taken; the targets it reaches are served."""
        self.accepted.add(step)
        self.read = None
        for word in self._served:
            if step >= cells[word]:
                self._served[word] = cells[word]
        self._has_told_skipped = False

    def await_confirmation(self, step: int, cells: Sequence[int], clock: Clock) -> None:
        """Waits until all hosts have agreed to stop at `step`, or on a later one instead.

        A rank that has stopped cannot go on, so it has to know that all others stop there too.
        """
        deadline = clock.monotonic() + CONFIRM_SECS
        while cells[PREEMPTION_CONFIRMED] > step:
            if cells[TARGET_PREEMPTION] > step:
                # Another rank had gone past it.
                self.preempted_at = None
                return
            if clock.monotonic() > deadline:
                log.warning(
                    "stopping at step %d for the preemption: the other hosts did not agree within "
                    "%.0f s; what they stop at may be another step",
                    step,
                    CONFIRM_SECS,
                )
                return
            clock.sleep(CONFIRM_POLL_SECS)

    def warn_skipped(self, step: int, outstanding: int) -> None:
        """Says, once until a save is taken again, that a due save was not taken."""
        if not self._has_told_skipped:
            self._has_told_skipped = True
            log.warning(
                "step %d was due and is not saved: %d checkpoints are still on their way to the "
                "durable tier, which is slower than they come",
                step,
                outstanding,
            )

    def is_preempted_before(self, step: int) -> bool:
        """Whether the run was preempted, and its loop left, before `step`; warn where it was."""
        if self.preempted_at is None or step <= self.last:
            return False
        log.warning(
            "finish step %d: not saved, because the process was told to stop and step %d was the "
            "last one given to save; call finish only where the training has come to its end",
            step,
            self.last,
        )
        return True

    def warn_unasked(self, step: int, now_secs: float) -> None:
        """Warn once where the loop goes on after a preemption and never asks whether to stop."""
        if self.preempted_at is None or self.has_asked_preemption or step <= self.preempted_at:
            return
        if self._unasked_count == 0:
            self._unasked_since_secs = now_secs
        self._unasked_count += 1
        is_late = now_secs - self._unasked_since_secs >= UNASKED_SECS
        if self._unasked_count >= UNASKED_STEPS or is_late:
            self.has_asked_preemption = True
            log.warning(
                "the process was told to stop and step %d is saved for it, but the training loop "
                "goes on: it does not ask manager.reached_preemption(step). Leave the loop where "
                "that is true; the job will be killed",
                self.preempted_at,
            )

    def warn_unfinished(self) -> None:
        """Warn where a run that has ended well leaves its last step behind."""
        newest = max(self.accepted | {self.floor})
        if self.last <= newest:
            return
        kept = f"the newest checkpoint is of step {newest}" if newest >= 0 else "there is none"
        log.warning(
            "closing after step %d, but %s: the next start repeats what came after it. Call "
            "manager.finish(%d, state) at the end of the training",
            self.last,
            kept,
            self.last,
        )

    def went_back(self, step: int) -> None:
        """The training goes on from `step`."""
        self.read = None
        self.floor = self.last = step
        self.accepted = {saved for saved in self.accepted if saved < step}
        self._served = {TARGET_DURABLE: NEVER, TARGET_RAM: NEVER}

    def stop(self) -> None:
        """Let no step pass without a check, which refuses it."""
        self.step_max = -1

    def _asks(self, policy: SaveDecisionPolicy | None, step: int) -> bool:
        return policy is not None and policy.should_save(step, (), context=self._context)

    def _is_target(self, word: int, step: int, cells: Sequence[int]) -> bool:
        """Whether `step` reaches a target that no checkpoint has served yet."""
        return step >= cells[word] and cells[word] != self._served[word]
