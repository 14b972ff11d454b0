"""The agent and its run's directory: it follows a move, and leaves where the directory is gone.

A run's directory that was deleted does not come back: what the host's RAM holds of the run can
never be durable there. The agent reports that to its trainers, gives its RAM back and leaves. A
directory that is unmounted or hidden may come back: nothing is given up while a trainer lives, and
for `UNREACHABLE_SECS` after that.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from holdfast.agent.protocol import Notice
from holdfast.agent.state import AgentState
from holdfast.agent.storage_worker import StorageWorker
from holdfast.errors import AgentUnavailableError, StorageError

LOOK_SECS = 1.0
NOTICE_SECS = 1.0
"""How long the trainers have to read the notice before the agent leaves."""
UNREACHABLE_SECS = 60.0
LEAVE_SECS = 30.0

log = logging.getLogger(__name__)


class DirectoryWatch:
    """Owned by the event loop; the file system is asked on a thread."""

    def __init__(self, state: AgentState, storage_worker: StorageWorker) -> None:
        self._state = state
        self._storage_worker = storage_worker
        self._unreachable_since: float | None = None
        self._leaves_at: float | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether the directory is gone, and this host's RAM of the run with it."""
        return self._leaves_at is not None

    def leaves_in_secs(self) -> float:
        """Return in how many seconds the agent leaves; only where the directory is given up."""
        assert self._leaves_at is not None
        return max(0.0, self._leaves_at - self._state.clock.monotonic())

    async def watch(self) -> None:
        """Look at the directory now and then, until it is given up."""
        while not self.is_given_up:
            await self._look()
            await asyncio.sleep(LOOK_SECS)

    async def check(self, path: str, word: str) -> None:
        """Check that a trainer has the same directory open.

        Raises:
            StorageError: it has, and the directory is gone.
            AgentUnavailableError: it has another one.
        """
        directory = self._state.durable.directory
        is_same = word == directory.identity_text or await self._storage_worker.query(
            directory.is_at, Path(path)
        )
        problem = await self._storage_worker.query(directory.problem)
        if is_same:
            if problem is not None:
                raise StorageError(problem)
            return
        if problem is not None and await self._storage_worker.query(directory.is_gone):
            # The caller finds no agent once this one has left, and starts one for its directory.
            self._give_up(problem)
            await asyncio.sleep(LEAVE_SECS)
        config = self._state.config
        raise AgentUnavailableError(
            f"open {path}: expected the directory of run {config.run_id} that the agent on host "
            f"{config.host} holds, {self._state.run}, found another one; open that one, or stop "
            "the agent (`holdfast stop`)"
        )

    async def _look(self) -> None:
        directory, now_secs = self._state.durable.directory, self._state.clock.monotonic()
        problem = await self._storage_worker.query(directory.problem)
        if problem is None:
            self._unreachable_since = None
            return
        if await self._storage_worker.query(directory.is_gone):
            self._give_up(problem)
        elif self._unreachable_since is None:
            self._unreachable_since = now_secs
            log.warning("%s", problem)
        elif self._state.group is None and now_secs - self._unreachable_since > UNREACHABLE_SECS:
            self._give_up(problem)

    def _give_up(self, problem: str) -> None:
        if self.is_given_up:
            return
        self._leaves_at = self._state.clock.monotonic() + NOTICE_SECS
        log.error("%s; the agent leaves", problem)
        # The log was in that directory.
        print(f"{problem}; the agent leaves", file=sys.stderr, flush=True)
        self._state.notices.post(Notice(kind="lost", reason=problem))
        self._state.wake()
