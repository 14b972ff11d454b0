"""`CheckpointManager`: saves a training run's state continuously, off the training thread.

Invariants:
- `save` costs a step that is not due a few reads of shared words, and never waits for storage.
- What `save` accepted is in `Progress` until it is durable or its failure was raised, once.
- The state is fixed before `save` returns; nothing that the caller does afterwards reaches it.

The file is longer than others because the public interface stands here whole, each call with what
it promises; what the calls do stands in the modules beside it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from holdfast.adapt.contract import Framework
from holdfast.agent import protocol
from holdfast.agent.words import ATTEMPT, TARGET_DURABLE, TARGET_PREEMPTION, TARGET_RAM
from holdfast.clock import Clock, SystemClock
from holdfast.errors import FencedError, HoldfastError, StepExistsError, WaitTimeoutError
from holdfast.format.names import CheckpointId
from holdfast.manager import arguments
from holdfast.manager.decisions import Decisions
from holdfast.manager.job import find_job
from holdfast.manager.lifetime import Holdings, Lifetime, replace_open
from holdfast.manager.link import Link
from holdfast.manager.metadata import CheckpointMetadata, metadata_of
from holdfast.manager.opening import open_run
from holdfast.manager.options import Options, RamTier, checked_signals
from holdfast.manager.overhead import OverheadMeter, meter_for
from holdfast.manager.own_policies import OwnPolicyThread, history, own_policies
from holdfast.manager.planning import Planner, Taking
from holdfast.manager.preemption import PreemptionSignals
from holdfast.manager.process_values import process_values_of
from holdfast.manager.progress import Progress
from holdfast.manager.restoring import (
    Restored,
    RestoreReport,
    event_of,
    restore_newest,
    restore_step,
)
from holdfast.manager.save_job import Job
from holdfast.manager.saver import Saver
from holdfast.manager.stepping import Stepping
from holdfast.manager.view import View
from holdfast.manager.voting import Votes
from holdfast.policy.preservation_policy import LatestN, PreservationPolicy
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy, SaveDecisionPolicy

SEAL_SECS = 600.0
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
        self._clock: Clock = SystemClock()
        self._framework = _framework()
        self._processes = self._framework.processes()
        self._decisions = Decisions(self._processes, self._clock)
        replace_open(directory)
        self._run = run = open_run(directory, self._decisions, self._clock)
        self._job = find_job(run, self._options, self._decisions, self._processes, self._clock)
        self._progress = Progress()
        self._own: OwnPolicyThread | None = None
        self._votes = Votes(self._decisions)
        with self._decisions.telling("join the host's agent"):
            self._link = Link(
                self._job.config, self._job.attach, self._clock, self._noticed, self._returned
            )
        self._steps = Stepping(self._link.place.origin, self._options, self._processes.count)
        held = Holdings(job=self._job, progress=self._progress, link=self._link)
        self._lifetime = Lifetime(run.directory, held, self._steps.stop)
        with self._lifetime.closed_on_error():
            self._begin(held)

    def _begin(self, held: Holdings) -> None:
        self._meter = meter_for(self._options)
        self._planner = Planner(
            self._run.run_id, self._processes.rank, self._processes.count, self._job.replicas
        )
        self._saver = held.saver = Saver(self._link, self._run.durable, self._progress, self._clock)
        self._signals = held.signals = PreemptionSignals(
            self._options.preemption_signals, self._told_to_stop
        )
        self._own = held.own = self._begin_own_policies()
        self._link.start()

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
            SaveFailedError: an earlier save failed in the background; told once, with its step.
            FencedError: a newer attempt has taken the run over.
            StepExistsError, StepOrderError, InvalidArgumentError: the step.
            UnsupportedLeafError: a leaf cannot be saved; nothing was written.
        """
        steps, place = self._steps, self._link.place
        words = place.words.values
        if type(step) is not int or not steps.last < step <= steps.step_max:
            self._check_step(step, force)
        steps.last = words[place.step_word] = step
        if self._meter is not None:
            self._measure(self._meter)
        if not (
            force
            or step >= words[TARGET_DURABLE]
            or step >= words[TARGET_RAM]
            or step >= words[TARGET_PREEMPTION]
            or words[place.notice_word]
            or words[ATTEMPT] != place.attempt
            or self._progress.has_failed
            or steps.is_due_by_step(step)
        ):
            return False
        return self._save_if_due(step, state, metrics, force)

    def resume(self, state: Any) -> tuple[int, Any]:
        """The next step and the state of the newest checkpoint that can be restored.

        Returns:
            (step + 1, that step's state), in the structure and sharding of `state`; (0, `state`)
            where there is nothing to resume.

        Raises:
            StructureMismatchError: all differences between `state` and what was saved.
            UnsupportedLeafError: nothing is saved yet, and a leaf of `state` never can be.
            CheckpointDamagedError: there are checkpoints, and none of them can be read.
        """
        restored = self._restore_newest(state)
        state = state if restored is None else restored.state
        # A leaf that cannot be saved is told now, not when the first save is due.
        layout = self._planner.layout(self._framework.outline(state))
        self._saver.expect(layout.size_bytes, self._planner.copies)
        return (0 if restored is None else restored.id.step + 1), state

    def restore(self, step: int | None = None, *, like: Any = None) -> Any:
        """The state of `step`, else of the newest checkpoint that can be restored.

        From here on the run goes on from that step: later ones are an abandoned branch.

        Args:
            step: None: the newest; older ones are tried where it is damaged, and that is told.
            like: arrays, ShapeDtypeStructs and values that give structure and sharding; None:
                nested dicts of NumPy arrays. Objects that keep a state may be left out.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError: the step.
            StructureMismatchError: `like` is not what was saved, or has objects whose states
                another number of processes saved; see `process_values`.
        """
        if step is None:
            restored = self._restore_newest(like)
            if restored is None:
                arguments.raise_nothing_saved(self._run.directory)
            return restored.state
        arguments.check_step(step)
        self._settle()
        restored = restore_step(
            self._look, step, self._framework, like, self._votes.rounds, self._clock
        )
        self._went_back(restored)
        return restored.state

    def latest_step(self) -> int | None:
        """The newest step that can be restored now, from any tier, on the present timeline."""
        newest = self._look().newest_sound()
        return newest.step if newest else None

    def all_steps(self) -> list[int]:
        """All steps that can be restored now, from any tier, on the present timeline, ascending."""
        return [checkpoint.step for checkpoint in self._look().sound()]

    def reached_preemption(self, step: int) -> bool:
        """Whether the process was told to stop and has saved `step`, or an earlier one, for it.

        True on all ranks at the same step.
        """
        preempted_at = self._steps.preempted_at
        return preempted_at is not None and step >= preempted_at

    def wait_until_finished(self, timeout_secs: float | None = None) -> None:
        """Waits until all accepted saves are durable, or have failed.

        Raises:
            SaveFailedError: one of them failed, or no agent has answered for a minute or two (what
                is sealed in RAM becomes durable when one goes on).
            WaitTimeoutError: the time is up; saving goes on.
        """
        arguments.check_timeout(timeout_secs)
        self._lifetime.check()
        if not self._progress.wait_finished(timeout_secs):
            steps = sorted(self._progress.steps())
            raise WaitTimeoutError(
                f"wait until finished: steps {steps[:10]} are not durable after {timeout_secs} s; "
                "saving goes on"
            )
        self._progress.raise_failure()

    def delete(self, step: int) -> None:
        """Removes the checkpoint of `step` from every tier, on all hosts.

        Raises:
            StepNotFoundError, StepUncommittedError: there is none.
            StorageError: some of it may be left; it cannot be restored any more.
            WaitTimeoutError: other hosts may hold it in memory until they hear of it.
        """
        arguments.check_step(step)
        found = self._look().find(step)
        request = protocol.Delete(ids=((found.step, found.attempt),))
        self._link.call("delete", request, protocol.Empty)

    def metadata(self, step: int) -> CheckpointMetadata:
        """What the checkpoint of `step` says of itself.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError.
        """
        arguments.check_step(step)
        view = self._look()
        return metadata_of(view.sources(view.find(step)))

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
        arguments.check_step(step)
        view = self._look()
        return process_values_of(view.sources(view.find(step)))

    def close(self) -> None:
        """Waits until all accepted saves are durable, then leaves the agent. Once is enough.

        Where the process is killed meanwhile, the agent goes on with what is sealed in RAM. Where
        an exception interrupts it, as a Ctrl-C does, call it again, or open the run again.

        Raises:
            SaveFailedError: a save failed and was not told yet.
        """
        if self._lifetime.is_closed:
            return
        self._lifetime.check()
        try:
            self.wait_until_finished(CLOSE_SECS)
        except HoldfastError:
            self._lifetime.close(SAVER_SECS)
            raise
        self._lifetime.close(SAVER_SECS)

    def _measure(self, meter: OverheadMeter) -> None:
        saving = self._progress.saving(meter.reach)
        cost_secs = meter.stepped(self._clock.monotonic(), saving)
        if cost_secs is not None:
            place = self._link.place
            place.words.values[place.cost_word] = int(cost_secs * 1e9)

    def _check_step(self, step: object, force: bool) -> None:
        self._lifetime.check()
        number = arguments.check_step(step)
        steps = self._steps
        if number == steps.last and number > steps.floor and number not in steps.accepted:
            # The call before told of an earlier save's failure, and this step is asked for again.
            return
        saved = [c for c in self._look().timeline if c.step == number]
        is_known = bool(saved) or number in self._steps.accepted
        if is_known and not force:
            raise StepExistsError(
                f"save step {number}: it is saved already; save a later one, or pass force=True to "
                "overwrite it"
            )
        if is_known:
            self._settle()
            saved = [c for c in self._look().timeline if c.step == number]
            origin = (saved[0].step, saved[0].attempt) if saved else None
            self._steps.went_back(number)
            self._link.branch(origin)
        elif number < self._steps.last or number == self._steps.floor:
            arguments.raise_step_order(number, self._steps.last)

    def _save_if_due(
        self, step: int, state: object, metrics: Mapping[str, float] | None, force: bool
    ) -> bool:
        self._progress.raise_failure()
        with self._progress.stopped_by(FencedError):
            self._link.finish_branch()
        place = self._link.place
        if place.words.values[ATTEMPT] != place.attempt:
            with self._progress.stopped_by(FencedError):
                place = self._link.renew()
        due = self._steps.due(step, place.words.values, self._is_told_alone(), force)
        if not due.is_any:
            return False
        waiting = self._progress.outstanding()
        if due.may_wait and self._saver.should_wait(is_saving=waiting > 0):
            return False
        is_behind = waiting >= protocol.pending_limit(self._planner.image_size_bytes)
        if not due.must_save and (is_behind or not self._saver.has_room()):
            if not due.is_target:
                self._steps.tell_skipped(step, waiting)
            self._saver.skip(CheckpointId(step, place.attempt))
            return False
        checked = arguments.check_metrics(metrics)
        snapshot = self._framework.snapshot(state)
        taking = Taking(
            id=CheckpointId(step, place.attempt), time=self._clock.now(), metrics=checked
        )
        plan = self._planner.plan(snapshot, taking)
        self._steps.took(step, due, place.words.values)
        copies = self._planner.copies
        self._saver.take(
            Job(plan=plan, snapshot=snapshot, is_durable_due=due.durable, copies=copies)
        )
        if due.is_preemption:
            self._steps.preempted_at = step
        if due.is_preemption and self._processes.count > 1:
            self._steps.await_confirmation(step, place.words.values, self._clock)
        return True

    def _is_told_alone(self) -> bool:
        """Whether this process was told to stop, and has nobody to agree with on the step."""
        words = self._link.place.words.values
        return self._processes.count == 1 and bool(words[self._link.place.notice_word])

    def _restore_newest(self, like: object) -> Restored | None:
        self._settle()
        restored = restore_newest(
            self._look, self._framework, like, self._votes.rounds, self._clock
        )
        if restored is not None:
            self._went_back(restored)
        return restored

    def _went_back(self, restored: Restored) -> None:
        """The run goes on from what was restored; a new attempt, unless that was its newest."""
        found = restored.id
        # Published first: targets that the agent sets from here on lie above this step.
        place = self._link.place
        place.words.values[place.step_word] = found.step
        self._saver.forget()
        timeline = self._look().timeline
        if timeline and timeline[-1] != found:
            self._link.branch((found.step, found.attempt))
        # Only now: an exception before this leaves the run where it was.
        self._steps.went_back(found.step)
        self.last_restore = restored.report
        if self._meter is not None:
            self._meter.paused()
        self._link.tell("restored", rank=self._processes.rank, **event_of(restored.report))

    def _settle(self) -> None:
        """Lets what is on its way arrive, so that a restore sees it."""
        self._lifetime.check()
        self._link.finish_branch()
        self._progress.wait(lambda sealed, finished: finished, SEAL_SECS)

    def _look(self) -> View:
        self._lifetime.check()
        return self._job.look(self._link, self._clock)

    def _noticed(self, notice: protocol.Notice) -> None:
        if self._own is not None:
            self._own.notice(notice)
        self._votes.notice(notice, self._run.group)
        if notice.kind == "fenced" and notice.data == self._run.group:
            self._progress.stop(FencedError(notice.reason))
        elif notice.kind == "unavailable":
            self._progress.fail_all(notice.reason)
        elif notice.kind == "warning":
            log.warning("the agent says: %s", notice.reason)
        elif notice.id is not None:
            self._progress.end(CheckpointId(*notice.id), notice.kind, notice.reason)
            self._saver.get_ready()

    def _returned(self) -> None:
        """A new agent is there: it is told again of what is sealed and not finished."""
        for sealed in self._progress.sealed_again():
            again = msgspec.structs.replace(sealed, again=True)
            with contextlib.suppress(FencedError):
                self._link.call("sealed", again, protocol.Empty)

    def _told_to_stop(self) -> None:
        self._link.place.words.values[self._link.place.notice_word] = 1

    def _begin_own_policies(self) -> OwnPolicyThread | None:
        policies = own_policies(self._options, self._processes.rank)
        if not policies.is_any:
            return None
        if policies.asks_to_save:
            policies.history.extend(history(self._look()))
        return OwnPolicyThread(
            policies,
            self._link,
            self._clock,
            lambda: self._steps.last,
            lambda: (self._progress.outstanding() > 0, self._is_told_alone()),
            self._progress.tell,
        )


def _framework() -> Framework:
    from holdfast.adapt.jax_state import JaxFramework

    return JaxFramework()
