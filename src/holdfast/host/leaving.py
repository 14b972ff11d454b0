"""Decide when an agent exits.

See docs/decisions/0005.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from holdfast.clock import Clock
from holdfast.format.names import NO_AGE, Age, age_of
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.driver.driver import Driver
from holdfast.host.tiers.ram_tier import RamTier

FIRST_TRAINER_SECS = 30.0
UNSETTLED_SECS = 3600.0
REFUSED_SECS = 1.0
"""How long an agent without data stays after it has refused its first start."""
CLOSED_SECS = 5.0
"""How long an agent stays once nobody needs it: for the next manager of the same process, and for
hosts that have not received the leader's last orders."""
STOPPING_SECS = 20.0
"""How long an agent that has to exit waits for a leader on another host, which may be gone, and for
what trainers save meanwhile."""
EXPECTED_SECS = 900.0
"""How long to wait for a process that lives and does not attach; meeting takes less."""


class ExpectedTrainers:
    """The processes that will attach once they have met the other hosts of their job.

    The other hosts have this agent's address from then on, so an agent that left now, and was
    replaced by another one, would not be reached by them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._processes: dict[int, tuple[int, float]] = {}
        """By process id: its pidfd, and the monotonic time until which it is awaited."""

    def add_process(self, pid: int) -> None:
        """Await that the process attaches."""
        self.remove_process(pid)
        # A process that has ended meanwhile is not awaited, nor one that this agent cannot see.
        if pid > 0:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            self._processes[pid] = fd, self._clock.monotonic() + EXPECTED_SECS

    def remove_process(self, pid: int) -> None:
        """Await the process no longer: it has attached, or ended."""
        process = self._processes.pop(pid, None)
        if process is not None:
            os.close(process[0])

    def has_any(self) -> bool:
        """Return whether a process is awaited that still runs."""
        for pid, (fd, until_secs) in list(self._processes.items()):
            ended, _, _ = select.select([fd], [], [], 0)
            if ended or self._clock.monotonic() >= until_secs:
                self.remove_process(pid)
        return bool(self._processes)

    def close(self) -> None:
        """Await nothing."""
        for pid in list(self._processes):
            self.remove_process(pid)


class Leaving:
    """The reasons of one agent to stay; owned by the event loop.

    Args:
        run: The agent's run.
        ram: This host's RAM.
        trainers: The attached trainers.
        driver: The driver of this host's node.
        is_needed: Returns whether work of the agent is under way that has to end first. It gets the
            age of the newest checkpoint to wait for, or None to wait for all.
        holds_agent: Returns whether the remote tier lacks what the agent is to copy there.

    Attributes:
        expected: processes that will attach soon.
        has_ended: the agent exits now: no trainer is admitted any more.
    """

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        driver: Driver,
        is_needed: Callable[[Age | None], bool],
        holds_agent: Callable[[], bool],
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._driver = driver
        self._is_needed = is_needed
        self._holds_agent = holds_agent
        self.expected = ExpectedTrainers(run.clock)
        self.has_ended = False
        self._refused_at_secs: float | None = None
        self._stopping_at_secs: float | None = None
        self._held_at_stop = NO_AGE
        self._alone_since_secs = run.clock.monotonic()
        self._has_served = False

    def note_trainers(self) -> None:
        """Note that trainers are attached now."""
        self._has_served = True
        self._alone_since_secs = self._run.clock.monotonic()

    def note_refusal(self) -> None:
        """Note that a start was refused."""
        self._refused_at_secs = self._run.clock.monotonic()

    def stop(self) -> None:
        """Leave even if trainers are attached, once what this host holds is durable.

        What they save meanwhile is waited for no longer than `STOPPING_SECS`, since they may save
        faster than storage takes it. The next agent finds it in RAM.
        """
        if self._stopping_at_secs is None:
            self._stopping_at_secs = self._run.clock.monotonic()
            pending = self._driver.view.pending_ids()
            self._held_at_stop = max(map(age_of, pending), default=NO_AGE)

    @property
    def is_stopping(self) -> bool:
        """Whether the agent was asked to exit."""
        return self._stopping_at_secs is not None

    @property
    def _stopping_secs(self) -> float:
        """For how long the agent has had to exit; 0 if it has not."""
        if self._stopping_at_secs is None:
            return 0.0
        return self._run.clock.monotonic() - self._stopping_at_secs

    def close(self) -> None:
        """Expect no process any more."""
        self.expected.close()

    @property
    def is_superseded(self) -> bool:
        """Whether another host's attempt has replaced the one here, and no other host reads here.

        With peers, the leader of the newer attempt decides what this host keeps.
        """
        return self._run.config.peers is None and self._driver.view.is_superseded

    def leaves_in_secs(self) -> float | None:
        """Return in how many seconds the agent exits if nothing happens; None: it stays."""
        if self._trainers.group is not None and self._stopping_at_secs is None:
            return None
        awaited = self._held_at_stop if self._stopping_secs > STOPPING_SECS else None
        if self._is_needed(awaited):
            return None
        view = self._driver.view
        if self._stopping_at_secs is not None:
            # Data that only this host holds has to become durable first; another host may lead and
            # decide when.
            is_awaited = not view.is_leading and not view.is_settled
            return None if is_awaited and self._stopping_secs < STOPPING_SECS else 0.0
        if self.expected.has_any() or (self._has_served and self._holds_agent()):
            return None
        alone_secs = self._run.clock.monotonic() - self._alone_since_secs
        if self.is_superseded or (view.is_closed and view.is_settled):
            # Lingering holds RAM for the restart after a failure, and there was none.
            return max(0.0, min(self._trainers.job.linger_secs, CLOSED_SECS) - alone_secs)
        if not view.is_leading and not view.is_settled and alone_secs < UNSETTLED_SECS:
            # Another host leads, and may need this host's checkpoints.
            return None
        # The trainer that started this agent needs time to attach.
        if self._refused_at_secs is not None and not self._has_served:
            # It was started for a start that was refused. If it holds nothing, the next start is
            # better off with an agent of its own, which has that one's environment.
            refused_secs = self._run.clock.monotonic() - self._refused_at_secs
            if not self._ram.checkpoints():
                return max(0.0, REFUSED_SECS - refused_secs)
        least_secs = 0.0 if self._has_served else FIRST_TRAINER_SECS
        return max(0.0, max(self._trainers.job.linger_secs, least_secs) - alone_secs)
