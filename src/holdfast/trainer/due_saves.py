"""Make the saves that are due: decide, fix the state, plan, and hand over to the saver.

`CheckpointManager.save` calls it only if shared memory or the step says that something may be due.
Everything here is on the training thread. See docs/decisions/0070.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.adapt.contract import Framework, HeldState, Processes
from holdfast.adapt.program_facts import loader_problem, order_problem
from holdfast.clock import Clock
from holdfast.errors import (
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    UnsupportedLeafError,
)
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.policy.loss_guard import LossGuard
from holdfast.trainer import arguments
from holdfast.trainer.last_states import LastState
from holdfast.trainer.opening.agent_place import AgentPlace
from holdfast.trainer.opening.proof import ProofLink
from holdfast.trainer.planning import Planner, Taking
from holdfast.trainer.position import Position
from holdfast.trainer.process import imports
from holdfast.trainer.process.preemption import PreemptionSignals
from holdfast.trainer.replica_votes import ReplicaVotes
from holdfast.trainer.save.save_queue import SaveRequest
from holdfast.trainer.save.save_schedule import Due

AWAITED_SIZE_BYTES_MIN = 64 * 1024 * 1024
"""From this size on the first save waits for its slot, 0.6 s per GB. Without one the state would be
copied to other memory first: 0.25 s per GB, and a third copy beside those in two slots."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSaves:
    """Make one process's saves that are due. Owned by the training thread.

    Attributes:
        check_call: Checks that the manager's call of that name may be made now.
        guard: The guard of the loss; None: there is none.
        replica_votes: The votes of the ranks on their replicas; None: they do not vote.
        proof: This process's part in `holdfast prove`, which follows each step; None: none.
    """

    position: Position
    processes: Processes
    framework: Framework
    planner: Planner
    signals: PreemptionSignals
    metric_names: arguments.MetricNames
    clock: Clock
    check_call: Callable[[str], None]
    guard: LossGuard | None = None
    replica_votes: ReplicaVotes | None = None
    proof: ProofLink | None = None

    def check_step(self, step: object, *, force: bool) -> int:
        """Check a step that does not simply follow the last one, and note the first ones.

        Returns:
            The step.

        Raises:
            InvalidArgumentError, StepExistsError, StepOrderError: As `CheckpointManager.save`.
        """
        self.check_call("save")
        position = self.position
        number = position.check_order(arguments.check_step(step), force=force)
        if position.steps.take_first(number, imports.is_recorded()):
            position.session.place.publish_first_step(number, self.clock.now())
        is_second = position.steps.take_second(number)
        imports.record_if(is_second and self.proof is None)
        if self.proof is not None:
            self.proof.reached(number, position.settle)
            position.steps.check_next(number)
        return number

    def expect(self, state: object) -> None:
        """Prepare the first save of a state.

        Raises:
            UnsupportedLeafError: A leaf of it cannot be saved.
        """
        layout = self.planner.layout(self.framework.outline(state))
        pin = self.framework.pinning(state)
        self.position.saver.expect(layout.size_bytes, self.planner.copies, pin)

    def save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, float] | None,
        *,
        force: bool,
        asked_secs: float,
    ) -> bool:
        """Save `state` if a checkpoint is due at `step`, and return whether it is being saved.

        Args:
            step: The step, in the order that `Position` checks.
            state: The state.
            metrics: As the caller has passed them.
            force: Save whatever the policies decide.
            asked_secs: The monotonic time of the call.

        An earlier failure is raised before anything is saved, and the next call tries again. A step
        that may be the last one, because of `force` or a preemption, is saved first; the call that
        repeats it finds it saved.

        Raises:
            HoldfastError: As `CheckpointManager.save`.
        """
        self.check_call("save")
        progress, place = self.position.progress, self.position.session.place
        may_be_last = force or bool(place.control.cells[place.notice_cell])
        if progress.is_stopped or not may_be_last:
            progress.raise_failure()
        is_saved = self._save(step, state, metrics, force=force, asked_secs=asked_secs)
        if is_saved and may_be_last:
            progress.raise_failure(saved_step=step)
        return is_saved

    def save_last(self, last: LastState) -> bool:
        """Save the step that was passed last, after an exception of the training.

        Nothing is saved where that step is saved already, or its state has changed since; the log
        says so.

        Returns:
            Whether it is being saved.

        Raises:
            HoldfastError: As `CheckpointManager.save`.
        """
        held, position = last.held, self.position
        if held is None or last.step in position.steps.accepted or position.progress.is_stopped:
            return False
        self.check_call("save")
        if change := held.change():
            log.info("step %d, the last one, cannot be saved any more: %s", last.step, change)
            return False
        now_secs = self.clock.monotonic()
        args = last.step, held, last.metrics
        try:
            is_saved = self._save(*args, force=True, asked_secs=now_secs, held=held)
        except HoldfastError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            # The computation of the state has failed too. The training's own error comes first.
            log.warning("step %d, the last one, cannot be saved: %s", last.step, error)
            return False
        if not is_saved:
            return False
        log.info("step %d, the last one, is being saved after an exception", last.step)
        return True

    def _save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, float] | None,
        *,
        force: bool,
        asked_secs: float,
        held: HeldState | None = None,
    ) -> bool:
        position = self.position
        is_repeated = step == position.progress.raised_at
        if step in position.steps.accepted and (is_repeated or not force):
            position.progress.raised_at = None
            return True
        votes = self.replica_votes if held is None else None
        if votes is not None and votes.must_go_back(step):
            return False
        if position.steps.stop.at is not None:
            position.steps.stop.warn_unasked(step, asked_secs)
        place = self._present_place()
        cells = place.control.cells
        due = position.steps.due(
            step,
            cells,
            decided=cells[place.decided_cell],
            is_stopping_alone=self.is_stopping_alone(),
            force=force,
        )
        self.signals.is_announced |= due.is_preemption
        checkpoint = CheckpointId(step, place.attempt)
        is_saved = due.is_any and self._can_save(checkpoint, due)
        # Before the state is read, which takes time: the agent may already ask who has met its
        # target.
        place.publish_decision(step, due.met if is_saved else ())
        if not is_saved:
            return False
        if held is None and not position.steps.accepted:
            self._prepare_first(state)
        try:
            checked = arguments.check_metrics(metrics)
            self.metric_names.check(step, checked)
            snapshot = self.framework.snapshot(state) if held is None else held.snapshot()
        except (InvalidArgumentError, UnsupportedLeafError):
            position.steps.refused_at = step
            raise
        taking = Taking(id=checkpoint, time=self.clock.now(), metrics=checked)
        plan = self.planner.plan(snapshot, taking)
        if held is None and not position.steps.accepted:
            self._warn_of_state(state)
        position.steps.note_taken(step, due)
        place.publish_accepted(step)
        position.saver.submit(
            SaveRequest(
                plan=plan,
                snapshot=snapshot,
                is_durable_due=due.durable,
                is_by_step=due.is_by_step,
                copies=self.planner.copies,
                compared=self.planner.next_compared(),
                asked_secs=asked_secs,
            )
        )
        if self.proof is not None and held is None:
            self.proof.saved(step, state)
        if due.is_preemption:
            self._stop_at(checkpoint, place)
        return True

    def _prepare_first(self, state: object) -> None:
        """Wait for the slot of a large state's first save, unless `resume` has prepared one."""
        saver = self.position.saver
        if saver.is_expecting or self.position.session.place.ram_folder is None:
            return
        try:
            layout = self.planner.layout(self.framework.outline(state))
        except UnsupportedLeafError:
            # The snapshot raises it.
            return
        if layout.size_bytes >= AWAITED_SIZE_BYTES_MIN:
            self.expect(state)
            saver.await_ready()

    def _warn_of_state(self, state: object) -> None:
        """Warn at the first save of an attempt of what a restart from this state would lose."""
        problems = [loader_problem(state), order_problem()]
        if self.guard is not None and not self.guard.is_saved:
            problems.append(
                "the guard is not in the state: after a restart it knows no losses and vouches for "
                'no checkpoint; put it there: {"model": model, …, "guard": guard}'
            )
        for problem in filter(None, problems):
            log.warning("%s", problem)

    def is_stopping_alone(self) -> bool:
        """Return whether a preemption was announced, and this process stops at its next step.

        Several processes agree on a common step first, unless their hosts do not reach each other.
        """
        place = self.position.session.place
        if not place.control.cells[place.notice_cell]:
            return False
        now_secs, is_only = self.clock.monotonic(), self.processes.count == 1
        return is_only or self.position.steps.stop.is_left_alone(place.control.cells, now_secs)

    def _present_place(self) -> AgentPlace:
        """Return this trainer's place in the run's current attempt, which may be a newer one."""
        session = self.position.session
        if not session.is_current:
            with self.position.progress.stopped_by(FencedError):
                session.finish_branch()
                if not session.is_current:
                    session.renew()
        return session.place

    def _can_save(self, checkpoint: CheckpointId, due: Due) -> bool:
        """Return whether there is room for the save; defer it or skip it if there is none."""
        steps, saver = self.position.steps, self.position.saver
        waiting = self.position.progress.outstanding()
        if due.may_wait and saver.should_wait(is_saving=waiting > 0):
            steps.defer(due)
            return False
        is_behind = waiting >= protocol.pending_limit(self.planner.image_size_bytes)
        if due.must_save or (not is_behind and saver.has_room()):
            return True
        if due.may_wait:
            steps.defer(due)
        elif not due.is_target:
            steps.warn_skipped(checkpoint.step, waiting)
        saver.skip(checkpoint)
        return False

    def _stop_at(self, checkpoint: CheckpointId, place: AgentPlace) -> None:
        """Stop for a preemption at a step that is being saved, unless a later one is agreed on."""
        steps, progress = self.position.steps, self.position.progress
        steps.stop.at = checkpoint.step
        if self.processes.count > 1 and self.is_stopping_alone():
            steps.stop.note_alone(checkpoint.step, progress.newest_text())
        elif self.processes.count > 1:
            steps.stop.await_confirmation(checkpoint.step, place.control.cells, self.clock)
            if steps.stop.at == checkpoint.step:
                progress.require(checkpoint)
        if steps.stop.at == checkpoint.step:
            level = logging.INFO if self.processes.rank == 0 else logging.DEBUG
            log.log(level, "preempted: step %d is being saved as the last one", checkpoint.step)
