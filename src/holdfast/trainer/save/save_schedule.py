"""Track the training's position and its accepted steps, and decide what is due at a step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.clock import Clock, SystemClock
from holdfast.format.names import STEP_MAX, CheckpointId
from holdfast.host.wire.control_block import (
    CELL_OF,
    NEVER,
    PREEMPTION_CONFIRMED,
    TARGET_DURABLE,
    TARGET_PREEMPTION,
    TARGET_RAM,
)
from holdfast.policy.contexts import SaveContext
from holdfast.policy.save_decision_policy import SaveDecisionPolicy
from holdfast.policy.save_evaluation import split
from holdfast.trainer.options import Options
from holdfast.trainer.save.preemption_stop import PreemptionStop

PREPARE_SECS = 30.0
"""How long to defer a save while a slot is prepared; the first one is mapped, locked and pinned."""
FREE_SECS = 2.0
"""How long to defer a save while waiting for a free slot, which the end of an earlier save frees.

One step is always waited.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is due at a step.

    Attributes:
        durable: A checkpoint is due in the durable tier.
        ram: A checkpoint is due in the RAM tier.
        must_save: It is saved even if earlier saves are in progress.
        is_target: It is due by a target, for which a later step serves too.
        may_wait: Everything that is due can wait for a later step, and no other rank saves at this
            one.
        is_by_step: The caller, a policy, or a preemption of a single process requires this step.
        is_preemption: It is the checkpoint of a preemption.
        reached: The target cells that the step has reached, and their steps, as they were read.
        met: The cells whose targets no earlier checkpoint has served and this one serves: those
            that have just this step, or, if no other rank saves, all that are reached.
    """

    durable: bool
    ram: bool
    must_save: bool
    is_target: bool
    may_wait: bool
    is_by_step: bool
    is_preemption: bool
    reached: Mapping[int, int]
    met: tuple[int, ...]

    @property
    def is_any(self) -> bool:
        """Whether a checkpoint is due in any tier."""
        return self.durable or self.ram


class SaveSchedule:
    """The schedule of one rank's saves. Owned by the training thread.

    Args:
        origin: The checkpoint from which the run continues; None for a new run.
        options: The manager's options.
        process_count: The number of processes of the job.
    """

    def __init__(self, origin: CheckpointId | None, options: Options, process_count: int) -> None:
        self._is_alone = process_count == 1
        self.floor = self.last = origin.step if origin is not None else -1
        self.step_max = -1
        """The highest step that needs no check: none before the first step and after the end."""
        self._has_ended = False
        self.accepted: set[int] = set()
        self.refused_at: int | None = None
        """The last step whose save was refused because of its arguments."""
        self.stop = PreemptionStop()
        self.read: int | None = None
        """The step that a restore has read since the last save without moving the run."""
        self._served = {TARGET_DURABLE: NEVER, TARGET_RAM: NEVER}
        self._in_time: dict[int, int] = {}
        """By cell, the newest target that was read at its step, or at the first one after it."""
        self._deferred: set[int] = set()
        """The cells whose targets were reached at an earlier step and deferred.

        The agent clears a cell when the training has passed its target, so the cell alone would
        lose the target.
        """
        self._durable = split(options.save).by_step
        ram = options.ram.save_decision_policy if options.ram is not None else None
        self._ram = split(ram).by_step if ram is not None else None
        self._has_warned_skipped = False
        self._saves_each_due = options.saves_each_due
        self._vote_steps = options.vote_steps
        # Policies by step are evaluated at every step and ignore the context, so one is reused.
        self._context = SaveContext(
            now=SystemClock().now(), is_saving_in_progress=False, reached_preemption=False
        )

    def is_due_here(self, step: int) -> bool:
        """Return whether something is due at this step, whatever the cells hold.

        That is a save, if a policy that depends on the step alone selects it, or a target was
        deferred; or a vote on replicas.
        """
        is_by_step = self._selects(self._durable, step) or self._selects(self._ram, step)
        is_vote = self._vote_steps is not None and step % self._vote_steps == 0
        return is_by_step or bool(self._deferred) or is_vote

    def is_asked_again(self, step: int, raised_at: int | None) -> bool:
        """Return whether the last call of `save` was for `step` too and raised an earlier failure.

        Args:
            step: The step passed to `save` now.
            raised_at: The step that was saved by a call that then raised an earlier failure.
        """
        is_saved = step in self.accepted and step != raised_at
        return step == self.last and step > self.floor and not is_saved

    def due(
        self,
        step: int,
        cells: Sequence[int],
        *,
        decided: int,
        is_stopping_alone: bool,
        force: bool,
    ) -> Due:
        """Return what is due at `step`.

        Args:
            step: The step.
            cells: The cells of the control block.
            decided: The last step before for which this rank has decided whether to save it.
            is_stopping_alone: A preemption was announced, and this process stops by itself.
            force: The caller requires a save.
        """
        # Read once: the agent may write them meanwhile.
        targets = {cell: cells[cell] for cell in CELL_OF.values()}
        reached = {cell: target for cell, target in targets.items() if step >= target}
        missed = self._missed(reached, decided)
        if cells[PREEMPTION_CONFIRMED] <= step:
            missed.discard(TARGET_PREEMPTION)
        self.stop.has_missed = TARGET_PREEMPTION in missed
        for cell in missed:
            del reached[cell]
        self._in_time |= reached
        if self.stop.at is not None:
            reached.pop(TARGET_PREEMPTION, None)
        is_preemption = TARGET_PREEMPTION in reached or (self.stop.at is None and is_stopping_alone)
        durable_target = self._is_target(TARGET_DURABLE, reached)
        ram_target = self._is_target(TARGET_RAM, reached)
        served = {
            TARGET_DURABLE: durable_target,
            TARGET_RAM: ram_target,
            TARGET_PREEMPTION: TARGET_PREEMPTION in reached,
        }
        durable_step, ram_step = self._selects(self._durable, step), self._selects(self._ram, step)
        must_save = force or is_preemption or (durable_step and self._saves_each_due)
        is_target = durable_target or ram_target
        return Due(
            durable=must_save or durable_target or durable_step,
            ram=ram_target or ram_step,
            must_save=must_save,
            is_target=is_target,
            may_wait=self._is_alone and is_target and not (must_save or durable_step or ram_step),
            is_by_step=force or is_stopping_alone or durable_step or ram_step,
            is_preemption=is_preemption,
            reached=reached,
            met=tuple(
                cell
                for cell, is_served in served.items()
                if is_served and (self._is_alone or targets[cell] == step)
            ),
        )

    def defer(self, due: Due) -> None:
        """Record that the targets which are due are served at a later step."""
        is_due = {TARGET_DURABLE: due.durable, TARGET_RAM: due.ram}
        self._deferred = {cell for cell, is_wanted in is_due.items() if is_wanted}

    def note_taken(self, step: int, due: Due) -> None:
        """Record that a checkpoint of `step` is accepted, which serves the targets it reaches."""
        self.accepted.add(step)
        self._deferred.clear()
        self.read = None
        for cell in self._served.keys() & due.reached.keys():
            self._served[cell] = due.reached[cell]
        self._has_warned_skipped = False

    def warn_skipped(self, step: int, outstanding: int) -> None:
        """Warn that a due save is skipped, once until a save is accepted again."""
        if not self._has_warned_skipped:
            self._has_warned_skipped = True
            log.warning(
                "step %d was due and is not saved: %d checkpoints are still being written to the "
                "durable tier, which is slower than the policies require",
                step,
                outstanding,
            )

    def is_preempted_before(self, step: int) -> bool:
        """Return whether the loop was left for a preemption before `step`, and warn if so."""
        if self.stop.at is None or step <= self.last:
            return False
        log.warning(
            "finish step %d: not saved, because the run was preempted and step %d was the last one "
            "passed to save; call finish only if the training has reached its end",
            step,
            self.last,
        )
        return True

    def warn_unfinished(self) -> None:
        """Warn if the training has ended without error and its last step is not saved."""
        newest = max(self.accepted | {self.floor})
        if self.last <= newest:
            return
        kept = f"the newest checkpoint is of step {newest}" if newest >= 0 else "there is none"
        if self.last == self.refused_at:
            log.warning(
                "closing after step %d, whose save was refused: %s; the next start repeats the "
                "later steps",
                self.last,
                kept if newest >= 0 else "there is no checkpoint",
            )
            return
        log.warning(
            "closing after step %d, but %s: the next start repeats the later steps. Call "
            "manager.finish(%d, state) at the end of the training",
            self.last,
            kept,
            self.last,
        )

    def has_accepted_after(self, step: int) -> bool:
        """Return whether a save of a later step was accepted in this attempt."""
        return max(self.accepted, default=-1) > step

    def went_back(self, step: int) -> None:
        """Set the position back to `step`, from which the training continues."""
        self.read = None
        self.floor = self.last = step
        self.accepted = {saved for saved in self.accepted if saved < step}
        self._served = {TARGET_DURABLE: NEVER, TARGET_RAM: NEVER}
        self._in_time.clear()
        self._deferred.clear()

    def check_every_step(self) -> None:
        """Send every further step through the check of the manager's state, which refuses it."""
        self.step_max, self._has_ended = -1, True

    def await_first(self) -> None:
        """Send the next step through the check, because it is the first one after a restore."""
        self.step_max = -1

    def check_next(self, step: int) -> None:
        """Send the step after `step` through the check too, in a proof each one."""
        if not self._has_ended:
            self.step_max = step

    def take_first(self, step: int, awaits_second: bool) -> bool:
        """Return whether the step being checked is the first one; later ones need no check.

        With `awaits_second`, the step after it is checked too.
        """
        is_first = self.step_max < 0 and not self._has_ended
        if is_first:
            self.step_max = step if awaits_second else STEP_MAX
        return is_first

    def take_second(self, step: int) -> bool:
        """Return whether the step being checked is the second one, if that is awaited."""
        is_second = 0 <= self.step_max < step
        if is_second:
            self.step_max = STEP_MAX
        return is_second

    def _selects(self, policy: SaveDecisionPolicy | None, step: int) -> bool:
        return policy is not None and policy.should_save(step, (), context=self._context)

    def _missed(self, reached: Mapping[int, int], decided: int) -> set[int]:
        """Return the cells whose targets were written after this rank had passed their steps.

        Its host refuses them, because other ranks may have passed them at another step, and the
        agent sets later ones. A save for a missed one would be one too many.
        """
        if self._is_alone:
            return set()
        return {
            cell
            for cell, target in reached.items()
            if target <= decided and self._in_time.get(cell) != target
        }

    def _is_target(self, cell: int, reached: Mapping[int, int]) -> bool:
        """Return whether this cell's target is reached and no checkpoint has served it yet."""
        is_new = cell in reached and reached[cell] != self._served[cell]
        return is_new or cell in self._deferred


class SlotPatience:
    """The time limits of deferring. The saver's thread prepares slots, the training thread asks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._preparing_at: float | None = None
        self._put_off_at: float | None = None

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Mark the time of the block, in which a slot is prepared."""
        self._preparing_at = self._clock.monotonic()
        try:
            yield
        finally:
            self._preparing_at = None

    def note_taken(self) -> None:
        """Record an accepted save: the time limit starts again for the next one."""
        self._put_off_at = None

    def for_preparing(self) -> bool:
        """Return whether a slot has been in preparation for less than `PREPARE_SECS`."""
        begun_at = self._preparing_at
        return begun_at is not None and self._clock.monotonic() - begun_at < PREPARE_SECS

    def for_earlier_saves(self) -> bool:
        """Return whether to wait for saves in progress, each of which holds a slot."""
        now = self._clock.monotonic()
        if self._put_off_at is None:
            self._put_off_at = now
        return now - self._put_off_at < FREE_SECS
