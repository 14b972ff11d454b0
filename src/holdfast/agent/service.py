"""One agent: its parts put together, its heartbeat, and when it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from holdfast.agent import protocol, words
from holdfast.agent.deciding import Decider
from holdfast.agent.group import Group
from holdfast.agent.joining import Joining
from holdfast.agent.keeping import Keeper
from holdfast.agent.saving import Saving
from holdfast.agent.state import AgentState
from holdfast.errors import FencedError, InvalidArgumentError, RunBusyError
from holdfast.format.names import CheckpointId

TICK_SECS = 0.02
IDLE_TICK_SECS = 0.5
FIRST_TRAINER_SECS = 30.0
PLACE_SECS = 1.0

log = logging.getLogger(__name__)


class Service:
    """What the server's routes call, and the loop that acts by itself."""

    def __init__(self, state: AgentState) -> None:
        self._state = state
        self._decider = Decider(state)
        self._keeper = Keeper(state, self._decider)
        self._joining = Joining(state, self._decider)
        self._saving = Saving(state, self._decider, self._keeper)
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._alone_since = state.clock.monotonic()
        self._seen_group: Group | None = None
        self._seen_attempt: int | None = None
        self._has_served = False
        self._look_at = 0.0
        state.wake = self._wake.set

    async def adopt(self) -> None:
        """Takes over what an agent before this one left; to be done before anybody is answered."""
        self._joining.adopt()
        await self._keeper.adopt()

    async def run(self) -> None:
        """Acts until it is time to leave."""
        while True:
            await self._tick()
            # Only what a look at the present state said may end it.
            if self._may_leave():
                return
            secs = TICK_SECS if self._state.group is not None else IDLE_TICK_SECS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), secs)
            self._wake.clear()

    def close(self) -> None:
        """Ends all threads, after what they are doing."""
        self._joining.close()
        self._keeper.close()

    def leave_soon(self) -> None:
        """Makes durable what is held, then leaves, whoever is still attached."""
        log.info("asked to leave")
        self._is_stopping = True
        self._state.ledger.want_newest_durable()
        self._wake.set()

    @property
    def is_all_durable(self) -> bool:
        """Whether the newest checkpoint, if there is one, is committed."""
        newest = self._state.ledger.newest_complete()
        return newest is None or newest.is_committed

    async def _tick(self) -> None:
        group = self._state.group
        attempt = group.attempt if group is not None else None
        if (self._seen_group, self._seen_attempt) != (group, attempt):
            self._seen_group, self._seen_attempt = group, attempt
            self._alone_since = self._state.clock.monotonic()
            await self._saving.group_changed()
        if self._state.group is not None:
            self._has_served = True
            self._alone_since = self._state.clock.monotonic()
        self._check_place()
        await self._joining.tick()
        await self._saving.tick()
        self._decider.tick()
        self._keeper.tick()

    def _check_place(self) -> None:
        """Leaves once its folder is gone: no trainer that comes finds it, but starts another."""
        now = self._state.clock.monotonic()
        if self._is_stopping or now < self._look_at:
            return
        self._look_at = now + PLACE_SECS
        if not self._state.has_place():
            log.warning("%s was removed; a trainer will start another agent", self._state.folder)
            self.leave_soon()

    def _leaves_in_secs(self) -> float | None:
        if self._state.group is not None and not self._is_stopping:
            return None
        if self._keeper.is_busy or self._state.ledger.is_saving():
            return None
        if self._is_stopping:
            return 0.0
        alone_secs = self._state.clock.monotonic() - self._alone_since
        least_secs = 0.0 if self._has_served else FIRST_TRAINER_SECS
        return max(0.0, max(self._state.linger_secs, least_secs) - alone_secs)

    def _may_leave(self) -> bool:
        return self._leaves_in_secs() == 0.0

    # What the routes call; the second argument is the caller's process.

    async def attach(self, request: protocol.Attach, pid: int) -> protocol.Attached:
        attached = await self._joining.attach(request, pid)
        self._wake.set()
        return attached

    async def branch(self, request: protocol.Branch, pid: int) -> protocol.Attached:
        return await self._joining.branch(request)

    async def want_slot(self, request: protocol.WantSlot, pid: int) -> protocol.Slot:
        return await self._saving.want_slot(request)

    async def filling(self, request: protocol.Filling, pid: int) -> protocol.Empty:
        self._saving.filling(request)
        return protocol.Empty()

    async def want_spare(self, request: protocol.WantSpare, pid: int) -> protocol.Slot:
        return await self._saving.want_spare(request)

    async def sealed(self, request: protocol.Sealed, pid: int) -> protocol.Empty:
        await self._saving.sealed(request)
        return protocol.Empty()

    async def abandoned(self, request: protocol.Abandoned, pid: int) -> protocol.Empty:
        await self._saving.abandoned(request)
        return protocol.Empty()

    async def watch(self, request: protocol.Watch, pid: int) -> protocol.Notices:
        return await self._state.notices.after(request.cursor)

    async def judged(self, request: protocol.Judged, pid: int) -> protocol.Empty:
        await self._keeper.judged([CheckpointId(*c) for c in request.keep])
        return protocol.Empty()

    async def request_save(self, request: protocol.RequestSave, pid: int) -> protocol.Requested:
        if self._state.group is None:
            raise InvalidArgumentError(
                f"save {self._state.config.run}: no trainer works on it now; there is nothing to "
                "save"
            )
        word = words.TARGET_DURABLE if request.durable else words.TARGET_RAM
        target = self._decider.request(word)
        self._state.events.write("save_requested", target_step=target, reason=request.reason)
        return protocol.Requested(target=target)

    async def delete(self, request: protocol.Delete, pid: int) -> protocol.Empty:
        group = self._state.group
        if group is not None and pid not in {member.pid for member in group.living}:
            raise FencedError(
                f"delete: process {pid} is none of attempt {group.attempt}'s, which has taken the "
                "run over; stop it"
            )
        await self._keeper.delete([CheckpointId(*c) for c in request.ids], "asked")
        return protocol.Empty()

    async def report(self, request: protocol.Report, pid: int) -> protocol.Empty:
        data = {k: v for k, v in request.data.items() if k not in ("step", "attempt")}
        checkpoint = None
        if {"step", "attempt"} <= request.data.keys():
            checkpoint = CheckpointId(request.data["step"], request.data["attempt"])
        self._state.events.write(request.event, checkpoint, **data)
        return protocol.Empty()

    async def detach(self, request: protocol.Detach, pid: int) -> protocol.Empty:
        self._joining.detach(request)
        return protocol.Empty()

    async def stop(self, request: protocol.Stop, pid: int) -> protocol.Empty:
        group = self._state.group
        if group is not None and group.living:
            pids = ", ".join(str(member.pid) for member in group.living)
            raise RunBusyError(
                f"stop the agent of {self._state.config.run}: its trainers live (processes {pids}) "
                "and would start it again; stop them first"
            )
        self.leave_soon()
        return protocol.Empty()

    async def status(self, request: protocol.Empty, pid: int) -> protocol.Status:
        state = self._state
        group = state.group
        members = sorted(group.living, key=lambda m: m.rank) if group else []
        return protocol.Status(
            run=state.config.run,
            run_id=state.config.run_id,
            host=state.config.host,
            pid=os.getpid(),
            attempt=group.attempt if group else state.events.attempt,
            folder=state.config.folder,
            ram_bytes=state.pool.size_bytes(),
            trainers=tuple(
                protocol.TrainerStatus(rank=m.rank, pid=m.pid, step=self._step_of(m.seat))
                for m in members
            ),
            held=tuple(
                protocol.HeldStatus(
                    step=e.id.step,
                    attempt=e.id.attempt,
                    parts_in_ram=len(e.ram),
                    part_count=e.part_count,
                    committed=e.is_committed,
                    durable_due=e.is_durable_due,
                    failed=e.failure,
                )
                for e in state.ledger
            ),
            pending=sum(e.is_pending for e in state.ledger),
            leaves_in_secs=self._leaves_in_secs(),
            peer_address=state.peer_address,
        )

    def _step_of(self, seat: int) -> int | None:
        step = self._state.words.values[words.step_word(seat)]
        return None if step == words.NO_STEP else step
