"""Watch the run's directory or prefix: follow it when it moves, and leave when it is gone.

A deleted run does not come back: the run's data in this host's RAM can never become
durable there. The agent reports that to its trainers, frees its RAM and exits. A directory that is
unmounted or hidden may come back: nothing is discarded while a trainer is attached, nor for
`UNREACHABLE_SECS` after that. In a bucket only a request shows a deletion, so there it is found by
the next save that fails, and else within `READ_SECS`.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from holdfast.agent.protocol import Notice
from holdfast.agent.state import AgentState
from holdfast.agent.storage_worker import StorageWorker
from holdfast.errors import AgentUnavailableError, StorageError

POLL_SECS = 1.0
NOTICE_SECS = 1.0
"""How long the trainers have to read the notice before the agent exits."""
UNREACHABLE_SECS = 60.0
LEAVE_SECS = 30.0
READ_SECS = 60.0
"""How often the record of a run in a bucket is read."""

log = logging.getLogger(__name__)


class DirectoryWatch:
    """The watch of one agent; owned by the event loop, with file system calls on a thread."""

    def __init__(self, state: AgentState, storage_worker: StorageWorker) -> None:
        self._state = state
        self._storage_worker = storage_worker
        self._unreachable_since: float | None = None
        self._leaves_at: float | None = None
        self._read_at_secs = state.clock.monotonic() + READ_SECS

    @property
    def is_lost(self) -> bool:
        """Whether the directory is gone, and this host's RAM of the run is discarded."""
        return self._leaves_at is not None

    def leaves_in_secs(self) -> float:
        """Return in how many seconds the agent exits; called only when the directory is lost."""
        assert self._leaves_at is not None
        return max(0.0, self._leaves_at - self._state.clock.monotonic())

    async def watch(self) -> None:
        """Check the directory every `POLL_SECS` until it is lost."""
        while not self.is_lost:
            await self._check_once()
            await asyncio.sleep(POLL_SECS)

    async def check_identity(self, path: str, identity: str) -> None:
        """Check that a trainer has the same directory open as this agent.

        Args:
            path: the path or URL by which the trainer opened it.
            identity: as `RunHome.identity_text`.

        Raises:
            StorageError: it is the same one, and it is gone.
            AgentUnavailableError: it is another one.
        """
        home = self._state.durable.home
        is_same = identity == home.identity_text or await self._storage_worker.query(
            home.is_at, path
        )
        problem = await self._storage_worker.query(home.unusable_reason)
        if is_same:
            if problem is not None:
                raise StorageError(problem)
            return
        if problem is not None and await self._storage_worker.query(home.is_gone):
            # The caller finds no agent once this one has left, and starts one for its directory.
            self._leave(problem)
            await asyncio.sleep(LEAVE_SECS)
        config = self._state.config
        raise AgentUnavailableError(
            f"open {path}: expected the directory of run {config.run_id} that the agent on host "
            f"{config.host} holds, {self._state.run}, found another one; open that one, or stop "
            "the agent (`holdfast stop`)"
        )

    async def _check_once(self) -> None:
        home, now_secs = self._state.durable.home, self._state.clock.monotonic()
        if now_secs >= self._read_at_secs:
            self._read_at_secs = now_secs + READ_SECS
            await self._storage_worker.look_for_run()
        problem = await self._storage_worker.query(home.unusable_reason)
        if problem is None:
            self._unreachable_since = None
            return
        if await self._storage_worker.query(home.is_gone):
            self._leave(problem)
        elif self._unreachable_since is None:
            self._unreachable_since = now_secs
            log.warning("%s", problem)
        elif self._state.group is None and now_secs - self._unreachable_since > UNREACHABLE_SECS:
            self._leave(problem)

    def _leave(self, problem: str) -> None:
        if self.is_lost:
            return
        self._leaves_at = self._state.clock.monotonic() + NOTICE_SECS
        if self._state.remote is not None:
            problem += (
                f". Its remote tier {self._state.remote.place} has what was copied: a start "
                "in an empty place with that remote tier continues from there"
            )
        log.error("%s; the agent leaves", problem)
        # The log was in that directory.
        print(f"{problem}; the agent leaves", file=sys.stderr, flush=True)
        self._state.notices.post(Notice(kind="lost", reason=problem))
        self._state.wake()
