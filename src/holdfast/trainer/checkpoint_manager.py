"""Define `CheckpointManager`, which saves a training run's state off the training thread.

Invariants:
- On a step that is not due, `save` reads a few cells of shared memory and never waits for storage.
- A save that `save` accepted stays in `Progress` until it is durable, or until its failure has been
  raised once.
- The state is fixed before `save` returns: later changes by the caller do not reach the checkpoint.

This module holds the complete public interface with the contract of each call. The other modules of
the folder implement it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from holdfast.adapt.contract import ArraysOf, Framework
from holdfast.engine.reading.metadata import CheckpointMetadata, metadata_of, process_values_of
from holdfast.engine.reading.view import find_newest_sound, find_sound
from holdfast.errors import HoldfastError, InvalidArgumentError, StepNotFoundError
from holdfast.format.names import STEP_MAX
from holdfast.host.wire import protocol
from holdfast.host.wire.control_block import ATTEMPT, TARGET_DURABLE, TARGET_PREEMPTION, TARGET_RAM
from holdfast.observe.metrics.metric_families import AgentMetrics, flat
from holdfast.policy.loss_guard import LossGuard
from holdfast.policy.preservation_policy import LatestN, PreservationPolicy
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy, SaveDecisionPolicy
from holdfast.trainer import arguments, last_states, options
from holdfast.trainer.job_process import JobProcess, errors_sent
from holdfast.trainer.lifetime import outlives_errors
from holdfast.trainer.options import (
    HostNetwork,
    Options,
    ProcessHooks,
    RamTier,
    RemoteTier,
    ReplicaCheck,
)
from holdfast.trainer.parts import open_parts
from holdfast.trainer.process import terminal
from holdfast.trainer.process.progress_bar import closing_state, progress_bar
from holdfast.trainer.restore.restoring import RestoredState, RestoreReport
from holdfast.trainer.save.patience import CLOSE_SECS, SAVE_PATIENCE_SECS

log = logging.getLogger(__name__)


class CheckpointManager:
    """Save and restore the checkpoints of one run, in one process of the training job.

    Every process of the job creates a manager of the same run, and the constructor waits until all
    have joined. One thread per process, the training thread, calls the methods. Use the manager in
    a `with` statement, or call `close` at the end.

    Args:
        directory: The run's durable directory, or its URL (docs/buckets.md), the same for all
            processes. Created if missing.
        save_decision_policy: When to save to the durable tier. Default:
            `ContinuousCheckpointingPolicy()`.
        preservation_policy: Which checkpoints the durable tier keeps. The newest one is always
            kept. Default: `LatestN(3)`.
        ram: The tier in this host's memory. None disables it.
        network: Where this host's agent is reached by other hosts (docs/hosts.md).
        remote: A second durable tier: a URL, a path, or a `RemoteTier` with policies of its own.
            The agents copy committed checkpoints there (docs/two_tiers.md). Default: none.
        takeover: Instead of raising `RunBusyError`, fence another live attempt on the run, and take
            a directory for the run where it cannot be decided whether it was moved or copied.
        on_save_failure: `raise`: the next call of `save` raises the failure of an earlier save, so
            that a program that does not expect it ends. `warn`: each failure is logged, and the
            training goes on; `wait_until_finished` and `close` raise it if nothing newer is safe.
        guard: Judges the loss. Checkpoints for which it vouches are kept for `rewind`, beside those
            that the preservation policy keeps (docs/guard.md).
        replicas: Compares what several ranks hold (docs/replicas.md). With
            `on_difference="rewind"` checkpoints are kept for `rewind` as with a guard. None:
            nothing is compared.
        process: What is done in this process beside the calls: handlers of signals, log lines, fork
            hooks, and the last step after an exception.
        framework: `jax`, `torch` or `numpy`, or a `holdfast.torch.TorchFramework`, which has
            options. None: the one that the program uses, else NumPy, which is for jobs of one
            process.

    Raises:
        InvalidArgumentError: An argument is invalid, or the processes' arguments contradict each
            other.
        NotARunError: The directory holds other files, or the hosts do not share it.
        NewerFormatError: A newer version of Holdfast wrote the run.
        StorageError: The directory cannot be read or written.
        RunBusyError: Another attempt on the run, or on its remote tier, is live. The message names
            its host and processes.
        AgentUnavailableError: The host's agent cannot be started or reached.
        ProcessLostError: Another process of the job ended, or did not join in time.

    After an error in the constructor no checkpoint is changed; a missing run may have been created.
    """

    last_restore: RestoreReport | None
    """The report of the last `restore` or `resume` that read a checkpoint; None before one has."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_decision_policy: SaveDecisionPolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        ram: RamTier | None = RamTier(),  # noqa: B008 - frozen, so that one default serves all
        network: HostNetwork = HostNetwork(),  # noqa: B008 - frozen, so that one default serves all
        remote: str | os.PathLike[str] | RemoteTier | None = None,
        takeover: bool = False,
        on_save_failure: options.OnSaveFailure = "raise",
        guard: LossGuard | None = None,
        replicas: ReplicaCheck | None = None,
        process: ProcessHooks = ProcessHooks(),  # noqa: B008 - frozen too
        framework: str | Framework | None = None,
    ) -> None:
        with errors_sent(framework):
            arguments.check_types(ram, network, process, guard, replicas)
            self._options = Options(
                save=save_decision_policy or ContinuousCheckpointingPolicy(),
                preservation=preservation_policy or LatestN(3),
                ram=ram,
                network=network,
                remote=options.remote_tier(remote),
                takeover=takeover,
                process=process,
                on_save_failure=options.save_failure_mode(on_save_failure),
                guard=guard,
                replicas=replicas,
            )
            self._process = JobProcess(framework, process)
        self.last_restore = None
        self._error: BaseException | None = None
        self._leaves_sealed = False
        """Whether `close` waits for no more than the seals of this process."""
        self._has_metrics = False  # whether metrics were passed that could be saved
        self._parts = parts = open_parts(directory, self._options, self._process)
        # What each step reads.
        self._steps, self._session = parts.position.steps, parts.position.session
        self._progress, self._clock = parts.position.progress, self._process.clock
        self._meter, self._own = parts.meter, parts.own
        location = parts.run.location.text
        self._last = last_states.last_state(location, self._options, self._process.framework)

    def __repr__(self) -> str:
        if not hasattr(self, "_parts"):
            return "CheckpointManager(not open)"
        attempt = self._session.place.number
        step = self._steps.last if self._steps.last >= 0 else None
        end = ", closed" if self._parts.lifetime.is_closed else ""
        return f"CheckpointManager({self._parts.run.location.text!r}, {attempt=}, {step=}{end})"

    def __enter__(self) -> CheckpointManager:
        self._parts.lifetime.check_call("enter")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._parts.lifetime.is_inherited:
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            # Whoever has started the process takes the training for finished.
            self.close()
            return
        self._error = self._session.error = error
        self._process.report_error(error)
        if isinstance(error, Exception) and outlives_errors():
            return
        for end in (self._save_last, self.close):
            try:
                end()
            except HoldfastError as own:
                # Raising this error would hide the one that ended the training.
                log.warning("the manager was closed after an error: %s", own)
                error.add_note(f"holdfast: after this error the manager was closed, and: {own}")

    def _save_last(self) -> None:
        """Save the step that was passed last, if it is not saved and its state is unchanged.

        Other ranks may never save it: they may wait for this one in a collective.
        """
        if self._last is not None and self._options.process.keep_last:
            is_saved = self._parts.due_saves.save_last(self._last)
            self._leaves_sealed = is_saved and self._process.processes.count > 1

    def save(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Save `state` if a checkpoint is due at `step`. Call it after every training step.

        The call returns as soon as the state is fixed: afterwards the caller may change or donate
        its arrays. The checkpoint becomes durable in the background.

        Args:
            step: The training step that produced `state`. It must increase from call to call.
            state: A pytree of arrays, Python values and objects with a state of their own.
            metrics: Numbers by name, for policies and for `holdfast ls`.
            force: Save whatever the policies decide, and overwrite the run's newest checkpoint if
                that is of the same step; the older one stays until the new one is committed. A
                forced save, and the save of a preemption, waits for a free place while two earlier
                saves are in progress.

        Returns:
            True if a checkpoint of this step is being saved.

        Raises:
            SaveFailedError: Earlier saves failed or were dropped. Each is reported once. This step
                may not have been saved; calling `save` again with the same step is allowed. With
                `force`, and in a preemption, it was saved first. Never with
                `on_save_failure="warn"`.
            FencedError: A newer attempt has taken over the run. This process saves nothing more.
            StepExistsError: The step is already saved, and `force` is not set.
            StepOrderError: The step is before the run's last one, also with `force`.
            InvalidArgumentError: The step or a metric is invalid, the manager is closed, or another
                thread uses it.
            UnsupportedLeafError: A leaf cannot be saved. Nothing was written.
            StorageError: The run's directory was removed. Nothing more can be saved.
        """
        steps, place = self._steps, self._session.place
        control = place.control.cells
        if type(step) is not int or not steps.last < step <= steps.step_max:
            step = self._parts.due_saves.check_step(step, force=force)
        steps.last = control[place.step_cell] = step
        if metrics is not None and not self._has_metrics:
            # Later ones are checked where they are saved: that may wait for a device.
            steps.refused_at = step
            arguments.check_metrics(metrics)
            steps.refused_at, self._has_metrics = None, True
        control[place.step_time_cell] = int(self._clock.monotonic() * 1e9)
        if self._meter is not None:
            self._meter.publish_step(self._progress, place, self._clock.monotonic())
        if self._last is not None:
            self._last.note(step, state, metrics)
        if self._own is not None:
            self._own.note_step()
        if not (
            force
            or step >= control[TARGET_DURABLE]
            or step >= control[TARGET_RAM]
            or step >= control[TARGET_PREEMPTION]
            or control[place.notice_cell]
            or control[ATTEMPT] != place.number
            or self._progress.has_failed
            or steps.is_due_here(step)
        ):
            control[place.decided_cell] = step
            return False
        blocking = self._parts.patience.blocking("save", SAVE_PATIENCE_SECS)
        with self._progress.drops_raised_after(step), blocking as began:
            return self._parts.due_saves.save(step, state, metrics, force=force, asked_secs=began)

    def finish(
        self, step: int, state: object, *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Make the last step of the run durable, whatever the policies decide.

        Call it when the training has ended, in all processes with the same step. The call starts
        the save; `close` waits until it is durable. It does nothing if the step is durable or is
        becoming durable, and if the run was preempted before that step.

        Args:
            step: The last training step.
            state: The state after that step; see `save`.
            metrics: Numbers by name; see `save`.

        Returns:
            True if this call makes the step durable.

        Raises:
            SaveFailedError: An earlier save failed in the background. The last step is saved all
                the same. Never with `on_save_failure="warn"`: `close` raises if this step fails.
            InvalidArgumentError: The step is invalid, or differs between processes.
            StepOrderError, FencedError, UnsupportedLeafError: As for `save`.
            ProcessLostError: Another process has ended.
        """
        self._parts.lifetime.check_call("finish")
        saves = self._parts.due_saves
        with self._parts.patience.blocking("finish") as began:
            return self._parts.finisher.finish(
                arguments.check_step(step),
                lambda last: saves.save(last, state, metrics, force=True, asked_secs=began),
            )

    def resume(
        self,
        state: Any,
        *,
        step: int | None = None,
        only: str | Sequence[str] | None = None,
        partial: str | Sequence[str] | None = None,
        cast: bool = False,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> tuple[int, Any]:
        """Continue from the newest checkpoint that can be restored, or go back to `step`.

        All processes of the job must call it. After going back to an older step, the run continues
        from there: the later checkpoints become an abandoned branch.

        Args:
            state: An initial state, which gives the structure, dtypes and sharding. Objects with a
                state of their own are set in place.
            step: The step to go back to. None selects the newest checkpoint; if that is damaged,
                older ones are tried, and each skipped one is logged and listed in `last_restore`.
            only: Path prefixes; only these are restored, the rest of `state` is returned as given.
            partial: Path prefixes where `state` may differ from the checkpoint, as for `restore`.
            cast: Convert arrays to the dtypes of `state`, as for `restore`.
            rename: New names for what was saved, as for `restore`.

        Returns:
            (step + 1, the state saved at `step`), with the structure and sharding of `state`; or
            (0, `state`) if the run has no checkpoint.

        Raises:
            StructureMismatchError: `state` differs from the saved state. The message lists all
                differences.
            UnsupportedLeafError: The run has no checkpoint, and a leaf of `state` cannot be saved.
            CheckpointDamagedError: None of the checkpoints can be read, or that of `step` cannot.
            StepNotFoundError, StepUncommittedError: There is no checkpoint of `step`.
            ProcessLostError: Another process has ended.

        After an error the run's position is unchanged.
        """
        self._parts.lifetime.check_call("resume")
        request = arguments.check_resume(state, only, partial, cast, rename)
        number = None if step is None else arguments.check_step(step)
        with self._parts.patience.of("resume"):
            restored = self._parts.restores.read(number, request)
            if restored is None:
                self._parts.position.start_again()
            else:
                self._parts.position.go_on_from(restored, "resume")
        if restored is not None:
            state = self._moved_to(restored, "resumed from")
        last = -1 if restored is None else restored.id.step
        self._begin_steps(last)
        # Raise for a leaf that cannot be saved now, rather than when the first save is due.
        self._parts.due_saves.expect(state)
        return last + 1, state

    @property
    def replicas_differ(self) -> bool:
        """Whether replicas differ, and all ranks have to call `rewind` now.

        With `ReplicaCheck(on_difference="rewind")`, and true after the same call of `save` on all
        ranks, which saved nothing.
        """
        votes = self._parts.replica_votes
        return votes is not None and votes.differs_at is not None

    def rewind(self, state: Any, *, order: options.SampleOrder | None = None) -> tuple[int, Any]:
        """Go back to the newest checkpoint that is vouched for, after a rejected loss.

        Or where `replicas_differ`: then to one up to which all replicas were equal. All processes
        of the job must call it. The run continues from there: the later checkpoints become an
        abandoned branch. Make loaders again afterwards.

        Args:
            state: As for `resume`.
            order: The `holdfast.data.Order` of the samples. After a rejected loss it leaves out
                those of the steps since that checkpoint, up to the last one that the guard judged.
                None, and where replicas differ: the training uses the same samples again.

        Returns:
            (step + 1, the state saved at `step`), as `resume`.

        Raises:
            StepNotFoundError: There is no checkpoint that is vouched for; or the training went back
                several times without coming further.
            InvalidArgumentError: The manager has no guard, and no replicas differ.
            StructureMismatchError, CheckpointDamagedError, ProcessLostError: As for `resume`.

        After an error the run's position is unchanged.
        """
        self._parts.lifetime.check_call("rewind")
        guard, request = self._options.guard, arguments.check_resume(state, None, None, False, None)
        votes = self._parts.replica_votes if self.replicas_differ else None
        if votes is not None:
            votes.check_rewind()
        elif guard is not None:
            guard.check_rewind(skips=order is not None)
        else:
            raise InvalidArgumentError(
                "rewind: expected a manager with a guard, or replicas that differ, found neither; "
                "pass guard=LossGuard()"
            )
        vouched = guard.vouched if guard is not None else STEP_MAX
        if votes is not None:
            vouched = min(vouched, self._options.equal.vouched)
        mark = None
        if order is not None and guard is not None and votes is None:
            mark = order.mark(guard.last + 1)
        with self._parts.patience.of("rewind"):
            restored = self._parts.restores.read(None, request, step_max=vouched)
            if restored is None:
                found = f"none of step {vouched} or before" if vouched >= 0 else "that none is yet"
                raise StepNotFoundError(
                    f"rewind: expected a checkpoint that is vouched for, found {found}; go on with "
                    "resume(state, step=...), or begin again"
                )
            self._parts.position.go_on_from(restored, "rewind")
        state = self._moved_to(restored, "went back to")
        start = restored.id.step + 1
        if guard is not None:
            guard.note_rewind(start - 1, vouched if votes is None else None)
        if votes is not None:
            votes.note_rewind()
        self._begin_steps(start - 1)
        if mark is not None and order is not None:
            # The restore has set the order to its plan of that time.
            order.go_on_from(mark, start)
        return start, state

    def _begin_steps(self, step: int) -> None:
        """Go on after the checkpoint of `step`, or before the first step: -1."""
        self._steps.await_first()
        if self._parts.replica_votes is not None:
            self._parts.replica_votes.begin(step)
        if self._own is not None:
            self._own.note_step()

    def _moved_to(self, restored: RestoredState, words: str) -> Any:
        self.last_restore = restored.report
        self._process.show(f"{words} {terminal.restore_text(restored.report)}")
        return restored.state

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        only: str | Sequence[str] | None = None,
        partial: str | Sequence[str] | None = None,
        cast: bool = False,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> Any:
        """Read the state of `step`, or of the newest checkpoint that can be restored.

        All processes of the job must call it. The call only reads: the run's position is unchanged,
        and later saves continue as before. To go back to a step, call `resume(state, step=step)`.

        Args:
            step: The step to read. None selects the newest checkpoint; if that is damaged, older
                ones are tried, and each skipped one is logged and listed in `last_restore`.
            like: Arrays, ShapeDtypeStructs and values that give structure, sharding and NumPy's
                byte order. Objects with a state of their own are set in place.
                None reads nested dicts of the framework's arrays, else of NumPy's (docs/guide.md).
            only: Path prefixes (`params`, `opt/0/mu`): only these arrays and values are read.
                Leaves of `like` elsewhere are returned as given.
            partial: Path prefixes where leaves of `like` that the checkpoint lacks, or has in
                another shape, are returned as given, and leaves that `like` lacks are ignored,
                objects with a state among them.
            cast: Convert arrays to the dtypes of `like`: floating-point to floating-point, integer
                to integer.
            rename: New names for what was saved: a dict from beginnings of names to what replaces
                them (`{"model/module.": "model/"}`), or a function of the name. `only` and
                `partial` mean the new names.

        Returns:
            The state, with the structure and sharding of `like`.

        Raises:
            StepNotFoundError: There is no checkpoint of `step`, or the run has no checkpoint.
            StepUncommittedError: The checkpoint of `step` was never committed.
            CheckpointDamagedError: None of the checkpoints can be read, or that of `step` cannot.
            StructureMismatchError: `like` differs from the saved state, or holds objects whose
                states were saved by a different number of processes; see `process_values`.
            ProcessLostError: Another process has ended.
        """
        self._parts.lifetime.check_call("restore")
        request = arguments.check_request(like, only, partial, cast, rename, ArraysOf.EITHER)
        number = None if step is None else arguments.check_step(step)
        with self._parts.patience.of("restore"):
            restored = self._parts.restores.read(number, request)
        if restored is None:
            arguments.raise_nothing_saved(self._parts.run.location)
        self.last_restore = restored.report
        self._process.show(f"read {terminal.restore_text(restored.report)}")
        self._parts.position.note_read(restored)
        return restored.state

    def latest_step(self) -> int | None:
        """Return the newest step that can be restored now from any tier; None if there is none.

        Only checkpoints of the current timeline count, not those of abandoned branches.
        """
        self._parts.lifetime.check_call("latest_step")
        views = self._parts.position.views
        newest = find_newest_sound(views.load_newest) or find_newest_sound(views.load)
        return newest.step if newest else None

    def all_steps(self) -> list[int]:
        """Return all steps that can be restored now from any tier, ascending; see `latest_step`."""
        self._parts.lifetime.check_call("all_steps")
        return [checkpoint.step for checkpoint in find_sound(self._parts.position.views.load)]

    def reached_preemption(self, step: int) -> bool:
        """Return whether a preemption was announced and its checkpoint is of `step` or earlier.

        Call it after each `save`, and leave the training loop if it returns True. All ranks return
        True at the same step. The call is also allowed after `close`.

        Args:
            step: The step last passed to `save`.

        Raises:
            InvalidArgumentError: A preemption was announced, and the step is invalid.
        """
        self._steps.stop.has_asked = True
        preempted_at = self._steps.stop.at
        return preempted_at is not None and arguments.check_step(step) >= preempted_at

    def announce_preemption(self) -> None:
        """Announce a preemption as a signal does, on any thread; one call at one rank is enough.

        For notices that are no signals (docs/preemption.md). A signal that follows repeats it.
        """
        self._process.signals.announce()

    def waiting(self, reason: str = "data") -> AbstractContextManager[None]:
        """Report the duration of the block as a wait of the training, for `holdfast report`.

        ```python
        with manager.waiting("data"):
            batch = next(batches)
        ```

        Entering and leaving writes to shared memory only. Of nested blocks the outermost counts.
        Each block takes a call of its own.

        Args:
            reason: What the training waits for: `data`, `evaluation` or `other`.

        Raises:
            InvalidArgumentError: The reason is none of these.
        """
        self._parts.lifetime.check_call("waiting")
        return self._parts.wait.of(reason)

    def stats(self) -> dict[str, float]:
        """Return what this host's agent has counted, as numbers by name, for a logger.

        ```python
        wandb.log(manager.stats(), step=step)  # at every hundredth step
        ```

        Names: docs/monitoring.md, with slashes (`holdfast/checkpoint_age_seconds/durable`).
        The call asks the agent, which takes about a millisecond: it is not for every short step.

        Raises:
            AgentUnavailableError: No agent can be reached.
            InvalidArgumentError: The manager is closed, or another thread uses it.
        """
        self._parts.lifetime.check_call("stats")
        return flat(self._session.call("metrics", protocol.Empty(), AgentMetrics))

    def wait_until_finished(
        self, timeout_secs: float | None = None, *, remote: bool = False
    ) -> None:
        """Wait until all accepted saves have ended and the preservation policy is applied.

        A save for the durable tier ends when it is durable; a save for RAM alone ends when the
        other hosts have confirmed it. Preservation is awaited for at most 10 seconds more.

        Args:
            timeout_secs: The longest wait in seconds. None waits for at most an hour, or for 5 s
                after a preemption for which the hosts did not agree on a step.
            remote: Wait also until the remote tier has the newest durable checkpoint, whatever its
                policy says; without `timeout_secs` for as long as that takes. For programs whose
                agent ends with them, as in a container.

        Raises:
            SaveFailedError: Saves failed, were dropped or are not confirmed, or no agent answers;
                with `on_save_failure="warn"` only if nothing newer is safe.
            AgentUnavailableError: No agent answers, with `remote`.
            WaitTimeoutError: The timeout has passed. Saving continues.
            WaitInterruptedError: A preemption signal arrived during the call. Saving continues.
            InvalidArgumentError: The timeout is invalid.
        """
        self._parts.lifetime.check_call("wait_until_finished")
        checked_secs = arguments.check_timeout(timeout_secs)
        limit_secs = checked_secs
        if checked_secs is None:
            checked_secs = self._parts.patience.limit_secs(None)
            limit_secs = self._parts.patience.limit_secs(CLOSE_SECS)
        if remote and self._parts.run.remote is None:
            arguments.raise_no_remote()
        began_secs = self._clock.monotonic()
        with self._parts.patience.of("wait_until_finished"):
            self._progress.wait_until_finished(limit_secs)
            if remote:
                if checked_secs is not None:
                    checked_secs -= min(self._clock.monotonic() - began_secs, checked_secs)
                self._parts.patience.await_upload(self._parts.run, checked_secs)

    def delete(self, step: int) -> None:
        """Remove the checkpoint of `step` from every tier, on all hosts.

        Raises:
            StepNotFoundError, StepUncommittedError: There is no checkpoint of `step`.
            StorageError: Some of its files may remain. It can no longer be restored.
            WaitTimeoutError: Other hosts may keep it in memory until they are notified.
        """
        self._parts.lifetime.check_call("delete")
        checkpoint = self._parts.position.views.load().find(arguments.check_step(step))
        request = protocol.Delete(ids=(checkpoint,))
        with self._parts.patience.of("delete"):
            self._session.call("delete", request, protocol.Empty)
        self._progress.note_deleted(checkpoint)

    def metadata(self, step: int) -> CheckpointMetadata:
        """Return the metadata of the checkpoint of `step`, without reading its arrays.

        Raises:
            StepNotFoundError, StepUncommittedError: There is no checkpoint of `step`.
            CheckpointDamagedError: Its records cannot be read.
        """
        self._parts.lifetime.check_call("metadata")
        number, view = arguments.check_step(step), self._parts.position.views.load()
        return metadata_of(view.sources(view.find(number)))

    def process_values(self, step: int) -> dict[str, list[Any]]:
        """Return the saved states of iterators and similar objects, of all processes that saved.

        A job with a different number of processes restores a state without these objects, and then
        divides their saved states among its processes.

        Returns:
            A list of states for each object's name (`data`, `loaders/train`): one for each process
            that saved, in the order of their ranks.

        Raises:
            StepNotFoundError, StepUncommittedError: There is no checkpoint of `step`.
            CheckpointDamagedError: Its records cannot be read.
        """
        self._parts.lifetime.check_call("process_values")
        number, view = arguments.check_step(step), self._parts.position.views.load()
        return process_values_of(view.sources(view.find(number)))

    def close(self) -> None:
        """Wait until all accepted saves are durable, then detach from the agent.

        The call does not wait for a remote tier: the agent stays until that has the newest
        checkpoint. See `wait_until_finished`.

        Further calls do nothing. A warning is logged if the last step passed to `save` was not
        saved; see `finish`. If an exception such as a Ctrl-C interrupts the call, call it again or
        open the run again. A `with` block that an exception leaves calls this too, logs its errors,
        and does not wait for a host of which nothing is heard.

        Raises:
            SaveFailedError: A save failed that no earlier error has reported; with
                `on_save_failure="warn"` only if nothing newer is safe.
            WaitTimeoutError: Saves are not durable after an hour, or after 5 s if the hosts did not
                agree where to stop for a preemption.
            WaitInterruptedError: A preemption signal arrived during the call.
            HoldfastError: The last comparison of replicas has found a difference, and a
                `ReplicaCheck` asks for more than a warning. Everything is saved.

        After an error the manager is closed; the agent continues with what is sealed in RAM.
        """
        if self._parts.lifetime.is_closed:
            return
        self._parts.lifetime.check_call("close")
        before = self._parts.checks.last_error
        try:
            with self._parts.patience.blocking("close"):
                self._parts.finisher.close(warns=self._error is None)
                is_first = self._process.rank == 0
                with progress_bar("closing", closing_state(self._progress), is_on=is_first):
                    if self._leaves_sealed:
                        self._parts.patience.await_sealed()
                    else:
                        self._parts.patience.await_end(is_after_error=self._error is not None)
        except HoldfastError:
            self._parts.release()
            raise
        self._parts.release()
        # The saver's thread has ended, and has compared the last checkpoints.
        self._parts.checks.check_end(before)
        if self._parts.replica_votes is not None:
            self._parts.replica_votes.check_end()
