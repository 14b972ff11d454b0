"""Open a run for a manager, and construct the manager's parts in the order of their needs.

Each part is constructed with those before it. What must be released when the manager is closed is
added to `HeldResources` as soon as it is acquired, so that an error releases it too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from dataclasses import dataclass

from holdfast import waits
from holdfast.clock import Clock
from holdfast.environment import RAM_VARIABLE
from holdfast.host.wire import protocol
from holdfast.observe.events.schema import ManagerOpened
from holdfast.observe.run_status import JobStatus
from holdfast.store.files.mounts import MEMORY_FILE_SYSTEMS, file_system_type
from holdfast.trainer import arguments
from holdfast.trainer.agent_notices import AgentNotices
from holdfast.trainer.due_saves import DueSaves
from holdfast.trainer.finisher import Finisher
from holdfast.trainer.job_process import JobProcess
from holdfast.trainer.lifetime import HeldResources, Lifetime, replace_open
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.job_context import find_job
from holdfast.trainer.opening.opening import OpenRun, open_run
from holdfast.trainer.opening.run_views import RunViews, ram_of
from holdfast.trainer.options import Options
from holdfast.trainer.planning import Planner
from holdfast.trainer.position import Position
from holdfast.trainer.process import terminal
from holdfast.trainer.process.end_report import TrainerOpened
from holdfast.trainer.process.training_wait import TrainingWait
from holdfast.trainer.ranks.rank_reports import ASK_SECS as RANKS_ASK_SECS
from holdfast.trainer.replica_votes import ReplicaVotes
from holdfast.trainer.restore.restore_votes import Votes
from holdfast.trainer.restore.restoring import Restorer
from holdfast.trainer.restores import Restores
from holdfast.trainer.save.overhead import OverheadMeter, meter_for
from holdfast.trainer.save.patience import Patience
from holdfast.trainer.save.progress import Progress
from holdfast.trainer.save.replica_checks import ReplicaChecks
from holdfast.trainer.save.save_schedule import SaveSchedule
from holdfast.trainer.save.saver import Saver
from holdfast.trainer.save.user_policies import UserPolicyThread, user_policies

SAVER_SECS = 300.0
"""How long `close` waits for the saver's thread, which may hang in storage."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerParts:
    """The parts of one open manager.

    `opened` is its report to a supervisor, `own` evaluates the user's policies, and
    `replica_votes` has the ranks' votes on replicas; None: there are none.
    """

    process: JobProcess
    opened: TrainerOpened | None
    run: OpenRun
    lifetime: Lifetime
    position: Position
    due_saves: DueSaves
    restores: Restores
    finisher: Finisher
    patience: Patience
    wait: TrainingWait
    checks: ReplicaChecks
    replica_votes: ReplicaVotes | None
    meter: OverheadMeter | None
    own: UserPolicyThread | None

    def release(self) -> None:
        """Release everything, and report the end. After an exception the next call continues."""
        # Asked first, because it would open the directory again.
        is_gone = self.run.durable.home.is_gone()
        self.lifetime.close(SAVER_SECS)
        signals, link = self.process.signals, self.process.link
        if link is not None and self.opened is not None:
            steps = self.position.steps
            is_preempted = steps.stop.at is not None or signals.is_announced
            link.report_end(
                self.opened,
                last_step=steps.last if steps.last >= 0 else None,
                is_preempted=is_preempted,
                is_finished=self.finisher.has_ended,
                announced_secs=signals.announced_secs,
                lost_secs=self.restores.votes.lost_secs,
            )
        left = self.position.session.left
        if left is not None and left.is_last and not is_gone:
            text = terminal.staying_text(self.run.durable.home.location_text, left)
            if text is not None:
                log.info("%s", text)


def open_parts(
    directory: str | os.PathLike[str], options: Options, process: JobProcess
) -> ManagerParts:
    """Open the run, join the host's agent and start the threads of this process.

    Raises:
        HoldfastError: As `CheckpointManager`. Everything is released, and handlers are restored.
    """
    with contextlib.ExitStack() as on_error:
        on_error.callback(process.signals.close)
        with process.rendezvous.propagating_errors("open the run"):
            if process.proof is not None:
                directory = process.proof.redirected(directory)
                options = process.proof.options(options)
            options.check()
        with waits.ended_by_signals("open the run", lambda: f"{directory} is not open"):
            joined = _join(directory, options, process)
            lifetime = Lifetime(
                joined.run.location.text, joined.held, joined.steps, options.process
            )
            with lifetime.closed_on_error():
                parts = _construct(joined, lifetime, options)
                _report_opened(joined)
            _show_opened(joined, options)
        on_error.pop_all()
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """This process with its agent joined, before anything of it runs."""

    process: JobProcess
    run: OpenRun
    votes: Votes
    steps: SaveSchedule
    held: HeldResources
    opened: TrainerOpened | None


def _join(directory: str | os.PathLike[str], options: Options, process: JobProcess) -> _Joined:
    """Open the run and join the host's agent."""
    rendezvous, clock = process.rendezvous, process.clock
    run = open_run(directory, rendezvous, clock, options.remote_text, takeover=options.takeover)
    job = find_job(run, options, rendezvous, process.processes, clock)
    replace_open(run.run_id, run.location.text)
    progress = Progress(clock, warns=options.on_save_failure == "warn")
    with rendezvous.propagating_errors("join the host's agent"):
        session = AgentSession(job.config, job.attach, clock, job.durable.home)
    process.session = session
    reports = rendezvous.reports
    reports.ask = lambda: session.ask_briefly("job", protocol.Empty(), JobStatus, RANKS_ASK_SECS)
    reports.ask_quiet = lambda: session.ask_briefly("quiet", protocol.Empty(), protocol.QuietHosts)
    progress.describe_parts = reports.parts_text
    steps = SaveSchedule(session.place.origin, options, process.processes.count)
    opened = None
    if process.link is not None:
        opened = process.link.begin_manager(job.config, session, steps)
    held = HeldResources(job=job, progress=progress, session=session)
    votes = Votes(rendezvous)
    return _Joined(process=process, run=run, votes=votes, steps=steps, held=held, opened=opened)


def _construct(joined: _Joined, lifetime: Lifetime, options: Options) -> ManagerParts:
    """Construct the parts, start the threads and install the handlers of signals."""
    process, run, votes, held = joined.process, joined.run, joined.votes, joined.held
    processes, clock, steps = process.processes, process.clock, joined.steps
    job, session, progress = held.job, held.session, held.progress
    meter = meter_for(options)
    planner = Planner(run.run_id, processes.rank, processes.count, job.replicas, options.replicas)
    checks = _replica_checks(joined, options)
    saver = held.saver = Saver(session, run.durable, progress, clock, checks)
    votes.read_together(job, session)
    replica_votes = _replica_votes(joined, options, checks)
    views = RunViews(job, session, clock)
    position = Position(session=session, steps=steps, progress=progress, saver=saver, views=views)
    due_saves = DueSaves(
        position=position,
        processes=processes,
        framework=process.framework,
        planner=planner,
        signals=process.signals,
        metric_names=arguments.MetricNames(options.keeping, processes.rank),
        clock=clock,
        check_call=lifetime.check_call,
        guard=options.guard,
        replica_votes=replica_votes,
        proof=process.proof,
    )
    restores = Restores(
        position=position,
        votes=votes,
        restorer=Restorer(process.framework, votes, clock),
        meter=meter,
        is_first=processes.rank == 0,
    )
    held.signals = process.signals
    process.signals.install()
    own = held.own = _policy_thread(options, position, due_saves, clock)
    wait = TrainingWait(session, clock)
    held.end_watch = process.framework.watch_compilations(wait.add_compilation)
    notices = AgentNotices(session, progress, votes, saver, checks, own, process.show)
    session.start_watching(progress.pending, notices.on_notice, notices.report_again)
    return ManagerParts(
        process=process,
        opened=joined.opened,
        run=run,
        lifetime=lifetime,
        position=position,
        due_saves=due_saves,
        restores=restores,
        finisher=Finisher(process.rendezvous, votes, position),
        patience=Patience(session, progress, steps, clock, host_count=job.attach.host_count),
        wait=wait,
        checks=checks,
        replica_votes=replica_votes,
        meter=meter,
        own=own,
    )


def _replica_checks(joined: _Joined, options: Options) -> ReplicaChecks:
    """Return the comparison of replicas on this rank."""
    session, job = joined.held.session, joined.held.job
    is_raising = options.replicas is not None and options.replicas.on_difference == "raise"
    return ReplicaChecks(
        joined.process.rank,
        joined.run.durable,
        functools.partial(ram_of, job, session, joined.process.clock),
        session.report_event,
        joined.held.progress.report_error if is_raising else None,
    )


def _replica_votes(joined: _Joined, options: Options, checks: ReplicaChecks) -> ReplicaVotes | None:
    """Return the votes of the ranks on their replicas; None: they do not vote."""
    if options.vote_steps is None:
        return None
    rendezvous = joined.process.rendezvous
    return ReplicaVotes(rendezvous, joined.votes, checks, options.vote_steps, options.equal)


def _policy_thread(
    options: Options, position: Position, due_saves: DueSaves, clock: Clock
) -> UserPolicyThread | None:
    """Start the thread of the user's policies; return None without any."""
    session, progress, steps = position.session, position.progress, position.steps
    policies = user_policies(options, session.rank, position.views.load)
    if not policies.is_any:
        return None
    return UserPolicyThread(
        policies,
        session,
        clock,
        lambda: steps.last,
        lambda: (progress.outstanding() > 0, due_saves.is_stopping_alone()),
        progress.report_error,
    )


def _report_opened(joined: _Joined) -> None:
    process = joined.process
    joined.held.session.report_event(
        ManagerOpened(
            rank=process.rank,
            pid=os.getpid(),
            process_secs=round(process.age_secs, 3),
            secs=round(process.clock.monotonic() - process.began_secs, 4),
            launchers=process.launch.names,
            restarts=process.launch.restarts,
        )
    )


def _show_opened(joined: _Joined, options: Options) -> None:
    attach, place = joined.held.job.attach, joined.held.session.place
    has_copies = attach.host_count > 1 and attach.copies > 1
    location, process = joined.run.location, joined.process
    process.show(terminal.opening_text(location, place, options.remote, has_copies=has_copies))
    if place.ram_folder is not None and process.rank == 0:
        ram = place.folder.parent
        kind = file_system_type(ram)
        if kind and kind not in MEMORY_FILE_SYSTEMS:
            log.warning(
                "the RAM tier, %s, is on %s, not in memory: saves are as slow as that file system; "
                "set %s to a folder on a tmpfs",
                *(ram, kind, RAM_VARIABLE),
            )
    if attach.larger_job:
        count = process.processes.count
        process.show(
            f"started by {attach.larger_job}, and the framework has {count}: it trains alone"
        )
