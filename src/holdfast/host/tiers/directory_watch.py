"""Watch the run's directory or prefix: follow it when it moves, and leave when it is gone.

A run that is gone does not come back there: the agent reports that to its trainers, and exits. A
directory that is unmounted or hidden may come back: the agent waits while a trainer is attached,
and for `UNREACHABLE_SECS` after that. In a bucket only a request shows a deletion, so there it is
found by the next save that fails, and else within `READ_SECS`.

A directory that was moved to another file system looks like one that was deleted. So checkpoints
that may be nowhere durable stay in RAM, as those of a killed agent do: what is newer than the
newest committed one, and with trainers attached the newest one in any case, because a move may have
passed the folder of its commit before. The rest is freed. The agent's folder notes that the
directory is gone, so a start at the new place continues from that RAM
(`trainer.opening.moved_runs`). See docs/decisions/0039.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection

from msgspec import structs

from holdfast.errors import AgentUnavailableError, StorageError
from holdfast.format.names import CheckpointId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.tiers.ram_place import RamPlace, kept_text, note_place, place_of
from holdfast.host.tiers.ram_tier import RamTier
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.wire.agent_directory import GROUP
from holdfast.host.wire.group_record import read_record, write_record
from holdfast.host.wire.protocol import Notice

POLL_SECS, LINGER_POLL_SECS = 1.0, 5.0
"""How often the directory is checked, with trainers and without."""
NOTICE_SECS = 1.0
"""How long the trainers have to read the notice before the agent exits."""
UNREACHABLE_SECS = 60.0
LEAVE_SECS = 30.0
READ_SECS = 60.0
"""How often the record of a run in a bucket is read."""

log = logging.getLogger(__name__)


class DirectoryWatch:
    """The watch of one agent; owned by the event loop, with file system calls on a thread.

    `unsaved` returns the checkpoints in RAM that may be nowhere durable; `wake` has the agent look
    whether to leave.
    """

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        storage_worker: StorageWorker,
        unsaved: Callable[[], Collection[CheckpointId]],
        wake: Callable[[], None],
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._storage_worker = storage_worker
        self._unsaved = unsaved
        self._wake = wake
        self.kept: Collection[CheckpointId] = ()
        """What stays in RAM of a run that is gone."""
        self._noted: RamPlace | None = None
        self._unreachable_since: float | None = None
        self._leaves_at: float | None = None
        self._read_at_secs = self._run.clock.monotonic() + READ_SECS

    @property
    def is_lost(self) -> bool:
        """Whether the directory is gone, and the agent leaves."""
        return self._leaves_at is not None

    def leaves_in_secs(self) -> float:
        """Return in how many seconds the agent exits; called only when the directory is lost."""
        assert self._leaves_at is not None
        return max(0.0, self._leaves_at - self._run.clock.monotonic())

    async def watch(self) -> None:
        """Check the directory again and again, until it is lost."""
        while not self.is_lost:
            await self.check_once()
            await asyncio.sleep(POLL_SECS)
            left_secs = LINGER_POLL_SECS - POLL_SECS
            while left_secs > 0 and not self._trainers.present:
                await asyncio.sleep(POLL_SECS)
                left_secs -= POLL_SECS

    async def check_identity(self, path: str, identity: str) -> None:
        """Check that a trainer has the same directory open as this agent.

        Args:
            path: the path or URL by which the trainer opened it.
            identity: as `RunHome.identity_text`.

        Raises:
            StorageError: it is the same one, and it is gone.
            AgentUnavailableError: it is another one.
        """
        home = self._run.durable.home
        is_same = identity == home.identity_text or await self._storage_worker.threads.query(
            home.is_at, path
        )
        problem = await self._storage_worker.threads.query(home.unusable_reason)
        if is_same:
            if problem is not None:
                raise StorageError(problem)
            return
        if problem is not None and await self._storage_worker.threads.query(home.is_gone):
            # The caller finds no agent once this one has left, and starts one for its directory.
            self._leave(problem, is_gone=True)
            await asyncio.sleep(LEAVE_SECS)
        config = self._run.config
        raise AgentUnavailableError(
            f"open {path}: expected the directory of run {config.run_id} that the agent on host "
            f"{config.host} holds, {self._run.path}, found another one; open that one, or stop "
            f"the agent (`holdfast stop {self._run.path}`)"
        )

    async def check_once(self) -> None:
        """Look once at the run's directory, and report what has changed."""
        home, now_secs = self._run.durable.home, self._run.clock.monotonic()
        if now_secs >= self._read_at_secs:
            self._read_at_secs = now_secs + READ_SECS
            await self._storage_worker.look_for_run()
        problem = await self._storage_worker.threads.query(home.unusable_reason)
        if problem is None:
            self._unreachable_since = None
            self._follow_move()
            return
        if await self._storage_worker.threads.query(home.is_gone):
            self._leave(problem, is_gone=True)
        elif self._unreachable_since is None:
            self._unreachable_since = now_secs
            log.warning("%s", problem)
        elif self._trainers.group is None and now_secs - self._unreachable_since > UNREACHABLE_SECS:
            self._leave(problem, is_gone=False)

    def _follow_move(self) -> None:
        """Note the directory's present path beside the RAM tier."""
        place = place_of(self._run.durable.home)
        if self._noted is not None and self._noted != place:
            self._note(place)
        self._noted = place

    def _note(self, place: RamPlace) -> None:
        try:
            note_place(self._run.folder, place)
        except OSError as error:
            log.info("the run's place is not noted beside the RAM tier: %s", error)

    def _leave(self, problem: str, *, is_gone: bool) -> None:
        if self.is_lost:
            return
        self.kept = self._unsaved()
        self._note(place_of(self._run.durable.home, is_gone=is_gone))
        if self.kept:
            problem += f". {kept_text(self._run.folder, self.kept)}"
        self._leaves_at = self._run.clock.monotonic() + NOTICE_SECS
        if self._run.remote is not None:
            problem += (
                f". Its remote tier {self._run.remote.place} has what was copied: a start "
                "in an empty place with that remote tier continues from there"
            )
        log.error("%s; the agent leaves", problem)
        # The log was in that directory.
        print(f"{problem}; the agent leaves", file=sys.stderr, flush=True)
        self._trainers.notices.post(Notice(kind="lost", reason=problem))
        self._wake()

    def free_rest(self) -> None:
        """Free the RAM of a run that is gone, except what is kept; call it once nothing is written.

        A failure is reported, and leaves the RAM in use.
        """
        if not self.is_lost:
            return
        # Until the trainers read the notice, they may have saved others in the place of those.
        self.kept = {*self.kept, *self._unsaved()}
        if not self.kept:
            return
        self._part_with_trainers()
        for checkpoint in self._ram.checkpoints():
            if checkpoint not in self.kept:
                self._ram.free_checkpoint(checkpoint)
        try:
            self._ram.pool.evict(self._ram.pool.free_slots())
        except StorageError as error:
            self._ram.report(error)

    def _part_with_trainers(self) -> None:
        """Note that the trainers, which may still live, belong to no agent of the run any more."""
        path = self._run.folder / GROUP
        record = read_record(path)
        if record is not None:
            members = tuple(structs.replace(member, started=0.0) for member in record.members)
            write_record(path, structs.replace(record, members=members))
