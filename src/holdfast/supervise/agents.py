"""Ask the agents that a command's processes use about the other ranks, and report to them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.identity import absence_text
from holdfast.errors import HoldfastError
from holdfast.host.wire.agent_directory import agent_folders
from holdfast.host.wire.agents_here import ask, status_of
from holdfast.host.wire.launch import find_agent
from holdfast.host.wire.protocol import AgentStatus, Empty, EventReport, QuietHosts
from holdfast.local_agent.client import AgentGoneError
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import (
    AttemptStarted,
    CommandEnded,
    PeerSilent,
    RanksLost,
    StepProgress,
)
from holdfast.observe.events.writer import EventWriter
from holdfast.observe.run_status import JobStatus
from holdfast.store.location import RunLocation, open_durable
from holdfast.supervise.stacks import keep_stacks
from holdfast.trainer.process.end_report import TrainerEnd, TrainerOpened

POLL_SECS = 0.1
MOVED_SECS = 3.0
"""How long an agent has to find where a directory was moved to; it looks once a second."""
LOST_SECS = 5.0
"""How long to wait until other hosts notice the loss of one; see `Settings.quiet_secs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOfRun:
    """A run that the command uses, and the host of its agent."""

    run: str
    run_id: str
    host: str


class Agents:
    """The agents to which the command's processes are or were attached.

    Args:
        clock: The clock.
        note: Shows one line to the user.
    """

    def __init__(self, clock: Clock, note: Callable[[str], None]) -> None:
        self._clock = clock
        self._note = note
        self._served: dict[tuple[str, str], AgentOfRun] = {}
        """By run id and host, because the path changes if the run's directory is moved."""
        self._run_ids: dict[str, list[str]] = {}
        """The ids of the runs that were opened at each path or URL, the newest last."""
        self._opened_last: set[str] = set()
        """The ids of the runs that the last start to open any has opened."""
        self._in_use: set[str] = set()
        """Where it had them open when it ended, or closed them when they were gone."""
        self.left_open: set[str] = set()
        """The ids of those that it did not close."""

    def served(self) -> list[AgentOfRun]:
        """Return all of them, in the order of their runs and hosts."""
        return sorted(self._served.values(), key=lambda served: (served.run, served.host))

    def add_agent(self, served: AgentOfRun) -> None:
        """Add an agent that is known before any process is attached to it."""
        self._served[served.run_id, served.host] = served

    def note_agents(self, opened: Iterable[TrainerOpened]) -> list[AgentStatus]:
        """Add the agents of managers that were opened; show where another run took one's place.

        Returns:
            The status of each added agent that answers now.
        """
        for report in sorted(opened, key=lambda report: report.time_secs):
            self.add_agent(AgentOfRun(run=report.run, run_id=report.run_id, host=report.host))
            self._note_other_run(report)
        statuses = [status for served in self._served for status in _statuses_of(*served)]
        for status in statuses:
            # The run's directory may have been moved.
            moved = AgentOfRun(run=status.run, run_id=status.run_id, host=status.host)
            self.add_agent(moved)
        return statuses

    def note_end(self, opened: Iterable[TrainerOpened], ends: Iterable[TrainerEnd]) -> None:
        """Note what a start that has ended had opened, and has closed."""
        opened, ends = list(opened), list(ends)
        if opened:
            self._opened_last = {report.run_id for report in opened}
            self._in_use = _left_open(opened, [end for end in ends if not end.is_gone])
            places = _left_open(opened, ends)
            self.left_open = {report.run_id for report in opened if report.run in places}

    def gone_run(self) -> str:
        """Return which run went from its place while the command used it; empty: none did.

        If it was moved within its file system, its agent, which lives on, finds where it is within
        `MOVED_SECS`.
        """
        until_secs = self._clock.monotonic() + MOVED_SECS
        while absent := self._absent():
            served = [own for own in self._served if own[0] in absent]
            statuses = [status for own in served for status in _statuses_of(*own)]
            for status in statuses:
                place, _ = absent[status.run_id]
                if status.run != place and not self._absence_text(status.run, status.run_id):
                    return f"the run at {place} was moved to {status.run}"
            if not statuses or self._clock.monotonic() >= until_secs:
                return next(text for _, text in absent.values())
            self._clock.sleep(POLL_SECS)
        return ""

    def _absent(self) -> dict[str, tuple[str, str]]:
        """Return by their ids the runs in use that are not at their places, and that in words."""
        in_use = {ids[-1]: place for place, ids in self._run_ids.items() if place in self._in_use}
        texts = {run_id: self._absence_text(place, run_id) for run_id, place in in_use.items()}
        return {run_id: (in_use[run_id], text) for run_id, text in texts.items() if text}

    def _absence_text(self, place: str, run_id: str) -> str:
        """Return as `absence_text`; of a bucket, whose service may be out of reach, nothing."""
        return "" if RunLocation(place).is_url else absence_text(place, run_id, self._clock)

    def _note_other_run(self, report: TrainerOpened) -> None:
        ids = self._run_ids.setdefault(report.run, [])
        if report.run_id in ids:
            return
        if ids:
            self._note(
                f"holdfast run: the run at {report.run} is another one than before: "
                f"{report.run_id}, where {ids[-1]} was; its directory was moved, removed or copied"
            )
        ids.append(report.run_id)

    def report_event(self, event: CommandEnded) -> None:
        """Add an event to the runs, through their agents; an agent that has ended is not needed.

        Those are the runs that the last start has opened. One that is gone has no events.
        """
        for served in self._served.values():
            is_of_last = not self._opened_last or served.run_id in self._opened_last
            if not is_of_last or self._absence_text(served.run, served.run_id):
                continue
            try:
                folder = find_agent(served.run_id, served.host)
                if folder is not None:
                    ask(folder, "report", EventReport(event=event), Empty)
                else:
                    self._write_event(served, event)
            except (AgentGoneError, HoldfastError) as error:
                self._note(f"holdfast run: the end is not in the run's events: {error}")

    def _write_event(self, served: AgentOfRun, event: CommandEnded) -> None:
        home = open_durable(served.run, self._clock).home
        writer = EventWriter(home, served.host, self._clock)
        begun = read_events(RunLocation(served.run).folder, AttemptStarted)
        writer.attempt = begun[-1].run_attempt if begun else 0
        writer.write(event)
        writer.close()

    def longest_gap_secs(self) -> float:
        """Return the longest step that the runs' events know, without reported waits."""
        longest = [0.0]
        for served in self._served.values():
            for event in read_events(RunLocation(served.run).folder, StepProgress):
                longest += [times.max_secs for times in (event.quiet, event.sealing, event.writing)]
        return max(longest)

    def other_ranks(
        self, statuses: Iterable[AgentStatus]
    ) -> tuple[dict[int, int | None], dict[int, str]]:
        """Return the steps of the ranks on other hosts, and which of those are busy, and why."""
        steps: dict[int, int | None] = {}
        busy: dict[int, str] = {}
        for status in statuses:
            if status.peer_address is None:
                continue
            with contextlib.suppress(AgentGoneError, HoldfastError):
                job = ask(Path(status.folder), "job", Empty(), JobStatus)
                for host in job.hosts:
                    if host.host != status.host:
                        steps |= dict(zip(host.ranks, host.steps, strict=False))
                        busy |= host.busy
        return steps, busy

    def keep_stacks(self, text: str) -> str:
        """Write the stacks of a hang into the runs' events; return the path of the file."""
        path = ""
        for served in self._served.values():
            name = f"stacks-{served.host}-{self._clock.now():%Y%m%dT%H%M%S}.txt"
            try:
                keep_stacks(served.run, name, text)
                path = str(RunLocation(served.run).events / name)
            except OSError as error:
                self._note(f"holdfast run: the stacks are not kept in {served.run}: {error}")
        return path

    def lost_host(self, since: datetime) -> str:
        """Return another host that was lost since then, or whose processes were; empty: none.

        Hosts notice each other's loss after a while: a run on several hosts is watched for up to
        `LOST_SECS`.
        """
        until_secs = self._clock.monotonic() + LOST_SECS
        while True:
            hosts = [self._look_for_lost(served, since) for served in self._served.values()]
            named = next((host for host in hosts if host), "")
            if named or None not in hosts or self._clock.monotonic() >= until_secs:
                return named
            self._clock.sleep(POLL_SECS)

    def _look_for_lost(self, served: AgentOfRun, since: datetime) -> str | None:
        """Return a lost host of one run; empty: it has one host; None: none is lost so far."""
        folder = find_agent(served.run_id, served.host)
        if folder is None:
            return ""
        with contextlib.suppress(AgentGoneError, HoldfastError):
            if status_of(folder).peer_address is None:
                return ""
            quiet = ask(folder, "quiet", Empty(), QuietHosts)
            if quiet.hosts:
                return quiet.hosts[0]
        kinds = RanksLost, PeerSilent
        lost: list[RanksLost | PeerSilent] = read_events(RunLocation(served.run).folder, *kinds)
        for event in lost:
            is_closed = isinstance(event, RanksLost) and event.closed
            if event.host == served.host and event.time >= since and not is_closed:
                return event.of_host
        return None


def _left_open(opened: Iterable[TrainerOpened], ends: Iterable[TrainerEnd]) -> set[str]:
    """Return where runs were opened more often than closed, by any process."""
    left = Counter((report.pid, report.run) for report in opened)
    left.subtract((end.pid, end.run) for end in ends)
    return {run for (_, run), count in left.items() if count > 0}


def _statuses_of(run_id: str, host: str) -> list[AgentStatus]:
    """Return the status of each agent of a run and host that answers."""
    statuses = []
    for folder in agent_folders(run_id, host):
        with contextlib.suppress(AgentGoneError, HoldfastError):
            statuses.append(status_of(folder))
    return statuses
