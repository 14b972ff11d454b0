"""`CheckpointManager`: saves a training run's state continuously, off the training thread.

Invariants:
- `save` costs a step that is not due a few reads of shared words, and never waits for storage.
- What `save` accepted is in `Progress` until it is durable or its failure was raised, once.
- The state is fixed before `save` returns; nothing that the caller does afterwards reaches it.

The public interface is here whole, each call with what it promises; modules beside it do the work.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from holdfast.adapt.contract import Framework, Processes
from holdfast.agent import protocol
from holdfast.agent.control_block import ATTEMPT, TARGET_DURABLE, TARGET_PREEMPTION, TARGET_RAM
from holdfast.clock import Clock, SystemClock
from holdfast.engine.reading.metadata import CheckpointMetadata, metadata_of
from holdfast.engine.reading.process_values import process_values_of
from holdfast.engine.reading.view import View
from holdfast.errors import FencedError, HoldfastError
from holdfast.format.names import CheckpointId
from holdfast.job.opening import open_run
from holdfast.job.options import Options, RamTier, checked_signals
from holdfast.job.rendezvous import Rendezvous
from holdfast.manager import arguments
from holdfast.manager.finisher import Finisher
from holdfast.manager.job_context import find_job
from holdfast.manager.lifetime import HeldResources, Lifetime, replace_open
from holdfast.manager.metric_names import MetricNames
from holdfast.manager.overhead import OverheadMeter, meter_for
from holdfast.manager.planning import Planner, Taking
from holdfast.manager.preemption import PreemptionSignals
from holdfast.manager.progress import STOPPED_BY, Progress
from holdfast.manager.restore_votes import Votes
from holdfast.manager.restorer import Restorer
from holdfast.manager.restoring import RestoreReport
from holdfast.manager.save_request import SaveRequest
from holdfast.manager.save_schedule import SaveSchedule
from holdfast.manager.saver import Saver
from holdfast.manager.seal_reports import report_all, report_unknown
from holdfast.manager.user_policies import UserPolicyThread, history, user_policies
from holdfast.policy.preservation_policy import LatestN, PreservationPolicy
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy, SaveDecisionPolicy

SAVER_SECS = 300.0
CLOSE_SECS = 3600.0

log = logging.getLogger(__name__)


class CheckpointManager:
    """Checkpoints one run, from one process of it.

    Args:
        directory: the run's durable directory; made where there is none.
        save_decision_policy: when the durable tier gets a checkpoint.
        preservation_policy: which checkpoints the durable tier keeps; the newest always.
        ram: the tier in this host's memory; None does without.
        takeover: fences another live attempt on the run instead of being refused.
        preemption_signals: the signals that announce a preemption.

    Raises:
        NotARunError, NewerFormatError, StorageError: the directory; nothing was changed.
        RunBusyError: another attempt is live; its host and processes are told.
        AgentUnavailableError: the host's agent does not start.
        InvalidArgumentError: an argument.

    One thread, the training thread, calls its methods.
    """

    last_restore: RestoreReport | None
    """What the last restore did, None before the first one."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_decision_policy: SaveDecisionPolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        ram: RamTier | None = RamTier(),  # noqa: B008 - frozen, so that one default serves all
        takeover: bool = False,
        preemption_signals: Sequence[int] = (signal.SIGTERM,),
    ) -> None:
        arguments.check_ram(ram)
        self._options = Options(
            save=save_decision_policy or ContinuousCheckpointingPolicy(),
            preservation=preservation_policy or LatestN(3),
            ram=ram,
            takeover=takeover,
            preemption_signals=checked_signals(preemption_signals),
        )
        self.last_restore = None
        self._ends_well = True
        self._clock: Clock = SystemClock()
        self._processes = _processes()
        self._rendezvous = Rendezvous(self._processes, self._clock)
        replace_open(directory)
        self._run = run = open_run(directory, self._rendezvous, self._clock)
        self._job = find_job(run, self._options, self._rendezvous, self._processes, self._clock)
        self._progress = Progress(self._clock)
        self._own: UserPolicyThread | None = None
        self._votes = Votes(self._rendezvous)
        with self._rendezvous.propagating_errors("join the host's agent"):
            start = self._job.begin_agent()
            # Loading the adapter takes as long as a part of the agent's start, so both go on.
            self._framework = _framework()
            self._session = self._job.join(start, self._clock, self._on_notice, self._on_new_agent)
        self._steps = SaveSchedule(self._session.place.origin, self._options, self._processes.count)
        held = HeldResources(job=self._job, progress=self._progress, session=self._session)
        self._lifetime = Lifetime(run.directory, held, self._steps.stop)
        with self._lifetime.closed_on_error():
            self._begin(held)

    def _begin(self, held: HeldResources) -> None:
        self._meter = meter_for(self._options)
        self._planner = Planner(
            self._run.run_id, self._processes.rank, self._processes.count, self._job.replicas
        )
        self._saver = held.saver = Saver(
            self._session, self._run.durable, self._progress, self._clock
        )
        self._metric_names = MetricNames(self._options.preservation, self._processes.rank)
        self._restorer = Restorer(
            framework=self._framework,
            votes=self._votes,
            session=self._session,
            steps=self._steps,
            saver=self._saver,
            progress=self._progress,
            meter=self._meter,
            clock=self._clock,
            look=self._look,
        )
        self._finisher = Finisher(self._rendezvous, self._votes, self._restorer)
        signals = self._options.preemption_signals
        self._signals = held.signals = PreemptionSignals(signals, self._on_stop_signal, self._clock)
        self._own = held.own = self._start_user_policies()
        self._session.start_watching(self._progress.pending)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._ends_well = False
        try:
            self.close()
        except HoldfastError as own:
            # The error that ends the training is the one to be seen.
            log.warning("while closing after an error: %s", own)

    def save(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Takes a checkpoint of `state` if one is due at `step`; to be called at every step.

        Args:
            step: the training step whose result `state` is; it grows from call to call.
            state: any pytree of arrays, Python values and objects that keep a state.
            metrics: numbers by name, for policies and for `ls`.
            force: whatever the policies say, and over a checkpoint of the same step, which stays
                until the new one is committed. Such a save, and that of a preemption, waits for
                its place where two earlier ones are on their way.

        Returns:
            True where a checkpoint of this step is being taken.

        Raises:
            SaveFailedError: earlier saves failed, or were dropped; raised once, with their steps.
            FencedError: a newer attempt has taken the run over.
            StepExistsError, StepOrderError, InvalidArgumentError: the step.
            UnsupportedLeafError: a leaf cannot be saved; nothing was written.
        """
        steps, place = self._steps, self._session.place
        control = place.control.cells
        if type(step) is not int or not steps.last < step <= steps.step_max:
            step = self._check_step(step, force)
        steps.last = control[place.step_cell] = step
        if self._meter is not None:
            self._measure(self._meter)
        if not (
            force
            or step >= control[TARGET_DURABLE]
            or step >= control[TARGET_RAM]
            or step >= control[TARGET_PREEMPTION]
            or control[place.notice_cell]
            or control[ATTEMPT] != place.attempt
            or self._progress.has_failed
            or steps.is_due_by_step(step)
        ):
            return False
        with self._progress.drops_raised_after(step):
            return self._save_if_due(step, state, metrics, force)

    def finish(
        self, step: int, state: object, *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Make the last step of the run durable, whatever the policies say; `close` waits for it.

        To be called where the training has come to its end, by all processes with the same step;
        the arguments are those of `save`. Nothing is done where the step is durable or on its way
        there, and where the run was preempted before it.

        Returns:
            True where the step is saved by this call.

        Raises:
            SaveFailedError: an earlier save failed in the background; this one is made anyway.
            InvalidArgumentError: the step, or another process gives another one.
            StepOrderError, FencedError, UnsupportedLeafError: as for `save`.
            ProcessLostError: another process has ended.
        """
        self._lifetime.check("finish")
        return self._finisher.finish(
            arguments.check_step(step),
            lambda number: self._save_if_due(number, state, metrics, force=True),
        )

    def resume(self, state: Any, *, step: int | None = None) -> tuple[int, Any]:
        """Go on from the newest checkpoint that can be restored, or go back to that of `step`.

        After going back the run goes on from `step`: later ones are an abandoned branch.

        Args:
            state: gives the structure and the sharding; objects that keep a state may be left out.
            step: None: the newest; older ones are tried where it is damaged, and that is told.

        Returns:
            (step + 1, that step's state), in the structure and sharding of `state`; (0, `state`)
            where there is nothing to resume.

        Raises:
            StructureMismatchError: all differences between `state` and what was saved.
            UnsupportedLeafError: nothing is saved yet, and a leaf of `state` never can be.
            CheckpointDamagedError: there are checkpoints, and none of them can be read.
            StepNotFoundError, StepUncommittedError: there is no checkpoint of `step`; so the run
                stays where it is.
        """
        self._lifetime.check("resume")
        restored = self._restorer.read(None if step is None else arguments.check_step(step), state)
        if restored is not None:
            self._restorer.go_on_from(restored)
            self.last_restore, state = restored.report, restored.state
        # A leaf that cannot be saved is told now, not when the first save is due.
        layout = self._planner.layout(self._framework.outline(state))
        self._saver.expect(layout.size_bytes, self._planner.copies)
        return (0 if restored is None else restored.id.step + 1), state

    def restore(self, step: int | None = None, *, like: Any = None) -> Any:
        """Read the state of `step`, else of the newest checkpoint that can be restored.

        The run stays where it is, and the saves after it go on as before. To go back to a step
        call `resume(state, step=step)`. All processes of the job have to call it.

        Args:
            step: None: the newest; older ones are tried where it is damaged, and that is told.
            like: arrays, ShapeDtypeStructs and values that give structure and sharding, and of
                NumPy arrays the byte order; None: nested dicts of NumPy arrays. Objects that keep
                a state may be left out.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError: the step.
            StructureMismatchError: `like` is not what was saved, or has objects whose states
                another number of processes saved; see `process_values`.
        """
        self._lifetime.check("restore")
        restored = self._restorer.read(None if step is None else arguments.check_step(step), like)
        if restored is None:
            arguments.raise_nothing_saved(self._run.directory)
        self.last_restore = restored.report
        self._restorer.note_read(restored)
        return restored.state

    def latest_step(self) -> int | None:
        """The newest step that can be restored now, from any tier, on the present timeline."""
        self._lifetime.check("latest_step")
        newest = self._look().newest_sound()
        return newest.step if newest else None

    def all_steps(self) -> list[int]:
        """All steps that can be restored now, from any tier, on the present timeline, ascending."""
        self._lifetime.check("all_steps")
        return [checkpoint.step for checkpoint in self._look().sound()]

    def reached_preemption(self, step: int) -> bool:
        """Whether the process was told to stop and has saved `step`, or an earlier one, for it.

        True on all ranks at the same step. It may be asked after `close` as well.
        """
        self._steps.has_asked_preemption = True
        preempted_at = self._steps.preempted_at
        return preempted_at is not None and arguments.check_step(step) >= preempted_at

    def wait_until_finished(self, timeout_secs: float | None = None) -> None:
        """Wait until all accepted saves are durable, or have failed, and preservation is applied.

        Where the preservation takes longer than a few seconds more, it is not waited for.

        Raises:
            SaveFailedError: some failed, were dropped or are not confirmed; or no agent answers.
            WaitTimeoutError: the time is up; saving goes on.
        """
        self._lifetime.check("wait_until_finished")
        self._progress.wait_until_finished(arguments.check_timeout(timeout_secs))

    def delete(self, step: int) -> None:
        """Removes the checkpoint of `step` from every tier, on all hosts.

        Raises:
            StepNotFoundError, StepUncommittedError: there is none.
            StorageError: some of it may be left; it cannot be restored any more.
            WaitTimeoutError: other hosts may hold it in memory until they hear of it.
        """
        self._lifetime.check("delete")
        found = self._look().find(arguments.check_step(step))
        request = protocol.Delete(ids=((found.step, found.attempt),))
        self._session.call("delete", request, protocol.Empty)

    def metadata(self, step: int) -> CheckpointMetadata:
        """What the checkpoint of `step` says of itself.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError.
        """
        self._lifetime.check("metadata")
        number, view = arguments.check_step(step), self._look()
        return metadata_of(view.sources(view.find(number)))

    def process_values(self, step: int) -> dict[str, list[Any]]:
        """The states of iterators and the like in the checkpoint of `step`, of all its processes.

        For a job with another number of processes, which restores a state without these objects
        and divides their states anew. Nothing is set, and the run stays where it is.

        Returns:
            By name (`data`, `loaders/train`) the states as they were saved, one for each process
            that saved, in the order of their ranks.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError.
        """
        self._lifetime.check("process_values")
        number, view = arguments.check_step(step), self._look()
        return process_values_of(view.sources(view.find(number)))

    def close(self) -> None:
        """Waits until all accepted saves are durable, then leaves the agent. Once is enough.

        Where the process is killed meanwhile, the agent goes on with what is sealed in RAM. Where
        the last step given to `save` was not saved, that is logged; see `finish`. Where an
        exception interrupts it, as a Ctrl-C does, call it again, or open the run again.

        Raises:
            SaveFailedError: a save failed and was not told yet.
        """
        if self._lifetime.is_closed:
            return
        self._lifetime.check("close")
        self._finisher.close(warns=self._ends_well)
        try:
            self._progress.wait_until_finished(CLOSE_SECS)
        except HoldfastError:
            self._lifetime.close(SAVER_SECS)
            raise
        self._lifetime.close(SAVER_SECS)

    # How a save that may be due is taken.

    def _measure(self, meter: OverheadMeter) -> None:
        saving = self._progress.saving(meter.reach)
        cost_secs = meter.stepped(self._clock.monotonic(), saving)
        if cost_secs is not None:
            place = self._session.place
            place.control.cells[place.cost_cell] = int(cost_secs * 1e9)

    def _check_step(self, step: object, force: bool) -> int:
        self._lifetime.check("save")
        return self._restorer.check_order(arguments.check_step(step), force=force)

    def _save_if_due(
        self, step: int, state: object, metrics: Mapping[str, float] | None, force: bool
    ) -> bool:
        self._lifetime.check("save")
        self._progress.raise_failure()
        if step in self._steps.accepted and not force:
            return True
        self._steps.warn_unasked(step, self._clock.monotonic())
        with self._progress.stopped_by(FencedError):
            self._session.finish_branch()
        place = self._session.place
        if place.control.cells[ATTEMPT] != place.attempt:
            with self._progress.stopped_by(FencedError):
                place = self._session.renew()
        due = self._steps.due(step, place.control.cells, self._is_stopping_alone(), force)
        if not due.is_any:
            return False
        waiting = self._progress.outstanding()
        if due.may_wait and self._saver.should_wait(is_saving=waiting > 0):
            return False
        is_behind = waiting >= protocol.pending_limit(self._planner.image_size_bytes)
        if not due.must_save and (is_behind or not self._saver.has_room()):
            if not due.is_target:
                self._steps.warn_skipped(step, waiting)
            self._saver.skip(CheckpointId(step, place.attempt))
            return False
        checked = arguments.check_metrics(metrics)
        self._metric_names.check(step, checked)
        snapshot = self._framework.snapshot(state)
        taking = Taking(
            id=CheckpointId(step, place.attempt), time=self._clock.now(), metrics=checked
        )
        plan = self._planner.plan(snapshot, taking)
        self._steps.note_taken(step, due, place.control.cells)
        copies = self._planner.copies
        self._saver.submit(
            SaveRequest(
                plan=plan,
                snapshot=snapshot,
                is_durable_due=due.durable,
                is_by_step=due.is_by_step,
                copies=copies,
            )
        )
        if due.is_preemption:
            self._steps.preempted_at = step
        if due.is_preemption and self._processes.count > 1:
            self._steps.await_confirmation(step, place.control.cells, self._clock)
            if self._steps.preempted_at == step:
                self._progress.require(taking.id)
        return True

    def _is_stopping_alone(self) -> bool:
        """Whether this process was told to stop, and has nobody to agree with on the step."""
        control = self._session.place.control.cells
        return self._processes.count == 1 and bool(control[self._session.place.notice_cell])

    def _look(self) -> View:
        return self._job.load_view(self._session, self._clock)

    def _on_notice(self, notice: protocol.Notice) -> None:
        if self._own is not None:
            self._own.on_notice(notice)
        self._votes.on_notice(notice, self._run.group)
        if notice.kind == "lost" or (notice.kind == "fenced" and notice.data == self._run.group):
            self._progress.stop(STOPPED_BY[notice.kind](notice.reason))
        elif notice.kind == "warning":
            log.warning("the agent says: %s", notice.reason)
        elif notice.kind == "unknown" and notice.id is not None:
            report_unknown(self._session, self._progress, CheckpointId(*notice.id))
        else:
            self._progress.notice(notice)
            if notice.id is not None:
                self._saver.get_ready()

    def _on_new_agent(self) -> None:
        """A new agent is there: it is told again of what is sealed and not finished."""
        self._progress.forget_preservation()
        report_all(self._session, self._progress)

    def _on_stop_signal(self) -> None:
        self._session.place.control.cells[self._session.place.notice_cell] = 1

    def _start_user_policies(self) -> UserPolicyThread | None:
        policies = user_policies(self._options, self._processes.rank)
        if not policies.is_any:
            return None
        if policies.asks_to_save:
            policies.history.extend(history(self._look()))
        return UserPolicyThread(
            policies,
            self._session,
            self._clock,
            lambda: self._steps.last,
            lambda: (self._progress.outstanding() > 0, self._is_stopping_alone()),
            self._progress.report_error,
        )


def _processes() -> Processes:
    # Not by way of `_framework`, whose modules load while the agent starts.
    from holdfast.adapt.jax.processes import JaxProcesses

    return JaxProcesses()


def _framework() -> Framework:
    from holdfast.adapt.jax.state import JaxFramework

    return JaxFramework()
