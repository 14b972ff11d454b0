"""Follow a run: its events as they are written, and the state of its hosts.

Reads only. Owned by one thread at a time: `poll` blocks for as long as agents and storage take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from holdfast.clock import Clock
from holdfast.coordination.settings import heartbeat_for
from holdfast.coordination.survivability import Standing
from holdfast.engine.lifecycle.newest import list_newest
from holdfast.engine.reading.run import PutBack, ReadableRun
from holdfast.errors import HoldfastError
from holdfast.observe.events.reader import EventReader, Omission
from holdfast.observe.events.schema import UNSTAMPED, CheckpointCommitted, CheckpointDeleted, Event
from holdfast.observe.live.snapshot import LiveView, view_of_run
from holdfast.observe.metrics.measures import RecentSteps
from holdfast.observe.reports.goodput import report_run
from holdfast.observe.reports.model import RunReport
from holdfast.observe.run_status import JobStatus

REPORT_SHARE = 0.05
"""The share of the time that may be spent on reports: of long runs they are made less often."""
REPORT_SECS = 2.0
POLLS_PER_HEARTBEAT = 3
ITEMS_MAX = 1_000_000
"""After so many events they are read anew."""

Answer = TypeVar("Answer", bound=msgspec.Struct)
Ask = Callable[[str, type[Any]], Any]
"""Calls an agent of the run by the name of the call; returns None if there is no agent."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What was found at one look: the state now, and the events since the look before."""

    view: LiveView
    events: list[Event]


class RunFollower:
    """Looks at a run again and again.

    Args:
        run: The run.
        ask: Calls an agent of the run on this host.
        clock: The time.
    """

    def __init__(self, run: ReadableRun, ask: Ask, clock: Clock) -> None:
        self._run = run
        self._ask = ask
        self._clock = clock
        self._reader = EventReader(run.durable.home)
        self._items: list[Event | Omission] = []
        self._newest = self._shown_until = UNSTAMPED
        self._durable: set[int] | None = None
        """The newest durable steps; None: they are not known."""
        self._report: RunReport | None = None
        self._report_at_secs = 0.0
        self._has_news = False
        self._host_count = 1
        self._compared: Standing | None = None
        self._put_back: PutBack | None = None
        """What was found for the checkpoint in `_compared`."""

    @property
    def poll_secs(self) -> float:
        """How long to wait between two looks: a lost host is seen within two heartbeats."""
        return heartbeat_for(self._host_count) / POLLS_PER_HEARTBEAT

    def poll(self) -> Poll:
        """Look at the run now."""
        if len(self._items) > ITEMS_MAX:
            # The hosts have removed their oldest segments: what they still have is less.
            self._reader, self._items = EventReader(self._run.durable.home), []
            self._shown_until = self._newest
        new = list(self._reader.read(is_live=True))
        self._items += new
        events = [e for e in new if isinstance(e, Event) and e.time > self._shown_until]
        for event in events:
            self._note_durable(event)
            self._newest = max(self._newest, event.time)
        problems: list[str] = []
        # A copy of a run has no events, and others may be those of commits.
        if self._durable is None or any(isinstance(item, Omission) for item in new):
            self._durable = self._listed(problems)
        job = self._asked("job", JobStatus, problems)
        steps = self._asked("steps", RecentSteps, problems) if job is not None else None
        if job is not None:
            self._host_count = max(1, len(job.hosts))
        self._has_news |= bool(new)
        report = self._reported()
        put_back = self._find_put_back(job, problems) if job is not None else None
        view = view_of_run(
            str(self._run.location),
            report,
            job,
            steps=steps,
            durable=None if self._durable is None else sorted(self._durable),
            problems=[*problems, *report.notes],
        )
        if put_back is not None:
            view = msgspec.structs.replace(
                view,
                newest=put_back.text,
                newest_step=put_back.step,
                survives=("not known before the next start",),
            )
        return Poll(view, events)

    def _find_put_back(self, job: JobStatus, problems: list[str]) -> PutBack | None:
        """Return whether the next start would not use the newest checkpoint that agents report.

        Nothing is compared while trainers run. The directory is listed once for each newest
        checkpoint.
        """
        newest = job.newest
        if newest is None or any(host.ranks for host in job.hosts):
            return None
        if newest != self._compared:
            try:
                self._put_back = self._run.find_put_back(
                    newest.step, newest.attempt, is_durable=newest.durable
                )
            except HoldfastError as error:
                problems.append(f"whether the directory has step {newest.step}: {error}")
                return None
            self._compared = newest
        return self._put_back

    def _listed(self, problems: list[str]) -> set[int] | None:
        """Return the newest steps that the directory has; None if it cannot be listed."""
        try:
            return {checkpoint.step for checkpoint in list_newest(self._run.durable).committed_ids}
        except HoldfastError as error:
            problems.append(f"which steps are durable: {error}")
            return None

    def _note_durable(self, event: Event) -> None:
        if self._durable is None:
            return
        if isinstance(event, CheckpointCommitted):
            self._durable.add(event.step)
        elif isinstance(event, CheckpointDeleted):
            self._durable.discard(event.step)

    def _asked(self, name: str, kind: type[Answer], problems: list[str]) -> Answer | None:
        try:
            answer = self._ask(name, kind)
        except HoldfastError as error:
            problems.append(str(error))
            return None
        assert answer is None or isinstance(answer, kind)
        return answer

    def _reported(self) -> RunReport:
        began_secs = self._clock.monotonic()
        if self._report is None or (self._has_news and began_secs >= self._report_at_secs):
            self._has_news = False
            self._report = report_run(str(self._run.location), self._items)
            ended_secs = self._clock.monotonic()
            pause_secs = max(REPORT_SECS, (ended_secs - began_secs) / REPORT_SHARE)
            self._report_at_secs = ended_secs + pause_secs
        return self._report
