"""Wait until the agents that a command's processes used have made all saves durable.

Invariant of `holdfast run`: if the command has succeeded and one of its saves is not durable, that
is reported. A trainer raises every failure until it closes its manager. This module reports the
failures after that, and those of trainers that never closed their manager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from datetime import datetime

from holdfast.clock import Clock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.identity import absence_text
from holdfast.errors import (
    AgentUnavailableError,
    HoldfastError,
)
from holdfast.host.tiers.ram_place import kept_text
from holdfast.host.wire.agent_directory import agent_folders
from holdfast.host.wire.agents_here import status_of
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import ensure_agent, find_agent
from holdfast.host.wire.protocol import AgentStatus, HeldStatus
from holdfast.local_agent.client import AgentGoneError
from holdfast.local_agent.place import is_locked
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    Event,
    TrainerLost,
)
from holdfast.store.location import RunLocation, open_durable
from holdfast.supervise.agents import AgentOfRun
from holdfast.trainer.opening.ram_tier import ram_store

POLL_SECS = 0.1
SHOWN_MAX = 3
"""How many checkpoints the line about the wait names."""
QUIET_SECS = 1.0
"""After how long a wait is reported."""
LEAVE_SECS = 20.0
"""How long an agent may be alive without answering."""
EVENT_SECS = 5.0
"""How long to wait for the event of a trainer's end."""
FAILING_SECS = 15.0
"""How long to wait for a checkpoint that failed to become durable, which the agent retries."""


def drain(
    agents: Iterable[AgentOfRun],
    secs: float,
    since: datetime,
    is_ending: Callable[[], bool],
    *,
    left_open: Collection[str] = (),
    clock: Clock,
    note: Callable[[str], None],
) -> list[str]:
    """Wait until all saves are durable.

    Args:
        agents: The agents that have them.
        secs: The longest wait, for all agents together.
        since: Failures before this time are ignored.
        is_ending: Called during the wait; returns whether to stop waiting.
        left_open: The ids of the runs that the command did not close although it has succeeded.
        clock: The clock.
        note: Shows one line to the user.

    Returns:
        One line for each checkpoint that is not durable.
    """
    deadline = clock.monotonic() + secs
    problems = []
    for served in agents:
        waiting = _Waiting(served, clock, note)
        lines = waiting.wait(deadline, is_ending)
        if served.run_id in left_open:
            lines += _cut_short(served, since, waiting.undone, clock)
        problems += lines or _unreported(served, since)
    return problems


class _RunGoneError(HoldfastError):
    """Only RAM has checkpoints of a run that is not at its place any more."""


class _Waiting:
    """The wait for one agent."""

    def __init__(self, served: AgentOfRun, clock: Clock, note: Callable[[str], None]) -> None:
        self._served = served
        self._clock = clock
        self._note = note
        self._reasons: dict[tuple[int, int], str] = {}
        self._newest: tuple[int, int] | None = None
        self.undone: set[tuple[int, int]] = set()
        """The attempts and steps that were not durable at the last look."""

    def wait(self, deadline: float, is_ending: Callable[[], bool]) -> list[str]:
        """Wait until all saves are durable; return a line for each checkpoint that is not."""
        note_at = self._clock.monotonic() + QUIET_SECS
        while True:
            lines, patience_secs = self._look(is_ending)
            if not lines:
                return []
            now = self._clock.monotonic()
            deadline = min(deadline, now + patience_secs)
            if now >= deadline or is_ending():
                return lines
            if now >= note_at:
                more = len(lines) - SHOWN_MAX
                shown = [*lines[:SHOWN_MAX], *([f"{more} more"] if more > 0 else [])]
                self._note(f"holdfast run: waiting: {'; '.join(shown)}")
                note_at = float("inf")
            self._clock.sleep(POLL_SECS)

    def _look(self, is_ending: Callable[[], bool]) -> tuple[list[str], float]:
        """Return a line for each checkpoint that is not durable, and how long to wait for them."""
        try:
            status = self._status(is_ending)
        except _RunGoneError as error:
            return [str(error)], 0.0
        except HoldfastError as error:
            return [str(error)], FAILING_SECS
        undone = self._undone(status) if status is not None else []
        self.undone = {_age(held) for held in undone}
        for held in undone:
            if held.failed is not None:
                self._reasons[_age(held)] = held.failed
        is_failing = any(_age(held) in self._reasons for held in undone)
        secs = FAILING_SECS if is_failing else float("inf")
        return [self._line(held) for held in undone], secs

    def _status(self, is_ending: Callable[[], bool]) -> AgentStatus | None:
        """Return the agent's status; None if it has ended and RAM holds nothing to make durable.

        If it has ended and RAM holds such checkpoints, another agent is started.

        Raises:
            _RunGoneError: RAM holds such checkpoints, and the run is not at its place any more.
            HoldfastError: No agent can be started, or it does not answer.
        """
        began = self._clock.monotonic()
        while True:
            folder = find_agent(self._served.run_id, self._served.host)
            if folder is None and not self._is_leaving():
                if not self._has_orphans():
                    return None
                config = AgentConfig(
                    run=self._served.run,
                    run_id=self._served.run_id,
                    host=self._served.host,
                    folder="",
                )
                folder, _ = ensure_agent(config, self._clock)
            if folder is not None:
                with contextlib.suppress(AgentGoneError):
                    return status_of(folder)
            if self._clock.monotonic() >= began + LEAVE_SECS or is_ending():
                break
            self._clock.sleep(POLL_SECS)
        raise AgentUnavailableError(
            f"wait for the agent of {self._served.run}: its process is alive, but has not answered "
            f"for {self._clock.monotonic() - began:.0f} s"
        )

    def _is_leaving(self) -> bool:
        return any(map(is_locked, agent_folders(self._served.run_id, self._served.host)))

    def _has_orphans(self) -> bool:
        """Return whether RAM holds a complete checkpoint that is not durable.

        Raises:
            _RunGoneError: It does, and the run is not at its place any more.
            HoldfastError: RAM or storage cannot be read.
        """
        ram = ram_store(self._served.run_id, self._served.host, self._clock)
        if ram is None:
            return False
        durable = list_checkpoints(open_durable(self._served.run, self._clock))
        orphans = [
            checkpoint
            for checkpoint, listing in list_checkpoints(ram).items()
            if listing.is_complete
            and not (checkpoint in durable and durable[checkpoint].is_committed)
        ]
        if orphans and (
            problem := absence_text(self._served.run, self._served.run_id, self._clock)
        ):
            raise _RunGoneError(f"{problem}. {kept_text(ram.root.parent, orphans)}")
        return bool(orphans)

    def _undone(self, status: AgentStatus) -> list[HeldStatus]:
        """Return the checkpoints that must still become durable.

        While trainers are attached, checkpoints newer than those of the first call do not count:
        such trainers outlive the command.
        """
        complete = [held for held in status.held if held.complete]
        newest = max(complete, key=_age) if complete and not status.trainers else None
        undone = [h for h in status.held if not h.committed and (h.durable_due or h is newest)]
        if self._newest is None:
            self._newest = max(map(_age, status.held), default=(0, 0))
        return [held for held in undone if not status.trainers or _age(held) <= self._newest]

    def _line(self, held: HeldStatus) -> str:
        reason = self._reasons.get(_age(held), "it is still being written")
        return (
            f"step {held.step} (attempt {held.attempt}) of {self._served.run} is not durable: "
            f"{reason}"
        )


def _age(held: HeldStatus) -> tuple[int, int]:
    return held.attempt, held.step


def _cut_short(
    served: AgentOfRun, since: datetime, undone: Collection[tuple[int, int]], clock: Clock
) -> list[str]:
    """Return a line for each trainer whose newest save ended with its process.

    A save is not lost where it or a later one is durable, or among those in `undone`, which are
    complete: launchers start their trainers again. The event of a trainer's end may follow that
    end after a moment.
    """
    until_secs = clock.monotonic() + EVENT_SECS
    while True:
        events = read_events(RunLocation(served.run).folder, TrainerLost)
        lost = [event for event in events if event.host == served.host and event.time >= since]
        if lost or clock.monotonic() >= until_secs:
            break
        clock.sleep(POLL_SECS)
    try:
        listed = list_checkpoints(open_durable(served.run, clock))
    except HoldfastError as error:
        return [f"whether the last save of {served.run} is durable is not known: {error}"]
    durable = [(c.attempt.number, c.step) for c in listed if listed[c].is_committed]
    newest = max([*durable, *undone], default=(0, 0))
    return [
        f"step {event.accepted_step} (attempt {event.run_attempt}) of {served.run} is lost: rank "
        f"{event.rank} ended without closing its manager before it was complete"
        for event in lost
        if event.accepted_step is not None and (event.run_attempt, event.accepted_step) > newest
    ]


def _unreported(served: AgentOfRun, since: datetime) -> list[str]:
    """Return a line for each failure that no trainer has raised, in attempts begun since `since`.

    Only attempts in which a trainer did not close its manager count: closing raises the failures. A
    part that a trainer could not write (`rank` is set) was raised by that trainer.
    """
    kinds = AttemptStarted, TrainerLost, CheckpointCommitted, CheckpointFailed
    history: list[Event] = read_events(RunLocation(served.run).folder, *kinds)
    events = [event for event in history if event.host == served.host and event.time >= since]
    begun = [event.run_attempt for event in events if isinstance(event, AttemptStarted)]
    if not begun or not any(isinstance(event, TrainerLost) for event in events):
        return []
    durable = {event.step_and_attempt for event in events if isinstance(event, CheckpointCommitted)}
    failed = {
        event.step_and_attempt: event.reason
        for event in events
        if isinstance(event, CheckpointFailed)
        and event.rank is None
        and event.attempt >= min(begun)
    }
    return [
        f"step {step} (attempt {attempt}) of {served.run} did not become durable: {reason}"
        for (step, attempt), reason in failed.items()
        if (step, attempt) not in durable
    ]
