"""Start the command, and start it again when it fails."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from holdfast.clock import Clock
from holdfast.environment import RESTART_VARIABLE, SUPERVISED_VARIABLE
from holdfast.host.wire.protocol import AgentStatus
from holdfast.local_agent.place import host_name
from holdfast.observe.events.schema import CommandEnded
from holdfast.supervise.agents import Agents
from holdfast.supervise.attempt_watch import AttemptWatch, CheckpointProgress
from holdfast.supervise.command import ENDING, Child, Signals, Starts, kill_left
from holdfast.supervise.ends import End, EndCause, Evidence, classify, signal_text
from holdfast.supervise.hang_watch import HangReport, HangWatch, end_hanging
from holdfast.supervise.own_folder import own_folder
from holdfast.supervise.restarted_workers import RestartedWorkers
from holdfast.supervise.restarts import Budgets, Decision, Restarts
from holdfast.trainer.process.end_report import reported_ends, reported_openings

NOTICE_SECS = 0.25
"""How often to look for the agents of the command's processes."""
PREPARE_SECS_MAX = 60.0
"""How long a restart waits for what makes it faster."""
PAUSE_SECS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of the command's last process.

    Attributes:
        code: Its exit code; 128 + N if signal N ended it.
        cause: Why it has ended.
        started: When it was started.
    """

    code: int
    cause: EndCause
    started: datetime


class Supervisor:
    """Start the command, and restart it when it fails.

    Args:
        starts: Starts the command.
        signals: The received signals, which are forwarded to the command.
        agents: The agents of the command's processes.
        clock: The clock.
        note: Shows one line to the user.
        hangs: Finds hangs; None: they are not looked for.
    """

    def __init__(
        self,
        starts: Starts,
        signals: Signals,
        agents: Agents,
        clock: Clock,
        note: Callable[[str], None],
        hangs: HangWatch | None = None,
    ) -> None:
        self._starts = starts
        self._signals = signals
        self._agents = agents
        self._clock = clock
        self._note = note
        self._hangs = hangs
        self._progress = CheckpointProgress()
        self._workers = RestartedWorkers(clock, note)
        self._reports, self._opened = "", set[int]()

    def run(self, budgets: Budgets) -> Ended:
        """Run the command until it ends by itself or by a signal, or is not to be restarted."""
        restarts = Restarts(budgets, host_name())
        while True:
            count, started = restarts.count, self._clock.now()
            child, end = self._run_once(count)
            decision = restarts.decide(
                end,
                self._clock.monotonic(),
                has_progress=self._progress.take(),
                gone_run=self._agents.gone_run(),
            )
            self._tell(end, decision, count)
            ended = Ended(code=end.code, cause=end.cause, started=started)
            if decision.restart_in_secs is None:
                return ended
            child.end_rest(self._clock)
            kill_left(self._opened, SUPERVISED_VARIABLE, self._reports)
            if not self._rested(decision.restart_in_secs):
                evidence = Evidence(code=end.code, received=tuple(self._signals.received))
                name = signal_text(next(n for n in evidence.received if n in ENDING))
                self._note(f"holdfast run: exit code {end.code}; not restarted: {name} received")
                return dataclasses.replace(ended, cause=classify(evidence).cause)

    def _run_once(self, restart_count: int) -> tuple[Child, End]:
        since = self._clock.now()
        with own_folder() as folder:
            self._reports = str(folder)
            watch = AttemptWatch(folder)
            own = {RESTART_VARIABLE: str(restart_count), SUPERVISED_VARIABLE: str(folder)}
            environment = os.environ | own
            with self._signals.passed_on(lambda: self._starts.start(environment)) as child:
                code, hang = self._wait(child, folder)
            # Later ones were not forwarded to it.
            received = tuple(self._signals.received)
            self._look(folder)
            openings = reported_openings(folder)
            self._opened = {report.pid for report in openings}
            self._agents.note_end(openings, reported_ends(folder))
            evidence = watch.evidence(code, received, child.pid)
        if hang is not None:
            evidence = dataclasses.replace(
                evidence, hang=hang.reason, hang_step=hang.step, stacks=hang.stacks
            )
        end = classify(evidence)
        if end.may_follow:
            lost_host = self._agents.lost_host(since)
            end = classify(dataclasses.replace(evidence, lost_host=lost_host))
        return child, end

    def _wait(self, child: Child, folder: Path) -> tuple[int, HangReport | None]:
        """Wait until the command has ended, or hangs and was ended."""
        if self._hangs is not None:
            self._hangs.begin()
        while True:
            statuses = self._look(folder)
            self._workers.look(child.pid)
            hang = None
            # A command that was told to end makes no more steps.
            if self._hangs is not None and not self._signals.is_ending:
                hang = self._hangs.look(statuses, folder)
            code = child.wait(NOTICE_SECS) if hang is None else end_hanging(child, hang.pids)
            self._starts.attend(child)
            if code is not None:
                return code, hang

    def _look(self, folder: Path) -> list[AgentStatus]:
        opened = reported_openings(folder)
        statuses = self._agents.note_agents(opened)
        self._progress.note(opened, statuses)
        return statuses

    def _tell(self, end: End, decision: Decision, count: int) -> None:
        """Tell the user and the run's events of an end and what follows."""
        code, secs = f"holdfast run: exit code {end.code}", decision.restart_in_secs
        if secs is not None:
            when = f"in {secs:g} s" if secs else "at once"
            self._note(f"{code}; {decision.count_text} {when}; {end.cause.value}: {end.reason}")
        elif decision.reason:
            self._note(f"{code}; not restarted: {decision.reason}; {end.cause.value}: {end.reason}")
        elif end.cause is EndCause.STOPPED:
            self._note(f"{code}; {end.cause.value}: {end.reason}")
        if decision.named_host:
            self._note(
                f"holdfast run: host {decision.named_host} failed 3 times within an hour: look at "
                "it, or leave it out"
            )
        # A refused start is no end of the training that has the run.
        if end.cause is not EndCause.FINISHED and not end.is_refused:
            self._agents.report_event(
                CommandEnded(
                    cause=end.cause.value,
                    code=end.code,
                    reason=end.reason,
                    last_step=end.step,
                    lost_host=end.lost_host,
                    restarts=count,
                    restart_in_secs=secs,
                    stopped_because=decision.reason,
                    stacks=end.stacks,
                )
            )

    def _rested(self, secs: float) -> bool:
        """Wait before a restart; return False if a signal interrupts that."""
        began_secs = self._clock.monotonic()
        while True:
            waited_secs = self._clock.monotonic() - began_secs
            is_prepared = waited_secs >= PREPARE_SECS_MAX or not self._starts.prepare()
            if self._signals.is_ending or (is_prepared and waited_secs >= secs):
                break
            self._clock.sleep(PAUSE_SECS)
        return not self._signals.is_ending
