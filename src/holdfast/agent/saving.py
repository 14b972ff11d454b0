"""Saves under way: slots handed out, parts sealed, checkpoints complete."""

from __future__ import annotations

import asyncio

from holdfast.agent import protocol, words
from holdfast.agent.deciding import Decider
from holdfast.agent.group import Group
from holdfast.agent.keeping import Keeper
from holdfast.agent.protocol import Notice
from holdfast.agent.state import AgentState
from holdfast.errors import (
    FencedError,
    InvalidArgumentError,
    OutOfSpaceError,
    StorageError,
)
from holdfast.format.names import CheckpointId

SLOTS_PER_RANK = 2
"""What holds the newest checkpoint, and what the next one goes into, where each is one image."""


class Saving:
    """What trainers do step by step."""

    def __init__(self, state: AgentState, decider: Decider, keeper: Keeper) -> None:
        self._state = state
        self._decider = decider
        self._keeper = keeper
        self._reserving = asyncio.Lock()
        # By rank: of the image that it fills or will fill, and of one of all that it saves.
        self._sizes_bytes: dict[int, int] = {}
        self._whole_sizes_bytes: dict[int, int] = {}

    async def want_slot(self, request: protocol.WantSlot) -> protocol.Slot:
        """A slot for one image; none, with the reason, where RAM has no room for it."""
        checkpoint = self._checked(request.id)
        state = self._state
        self._decider.begun(checkpoint.step)
        state.filling[request.rank] = checkpoint
        state.handed_out.pop(request.rank, None)
        if not state.has_ram:
            return protocol.Slot(name=None, reason="the run has no RAM tier")
        pending = [e for e in state.ledger if e.is_pending and e.id != checkpoint]
        if len(pending) >= protocol.pending_limit(request.size_bytes):
            return protocol.Slot(name=None, reason="the durable tier is behind", busy=True)
        self._sizes_bytes[request.rank] = request.size_bytes
        try:
            # One at a time, so that each sees what the one before was given.
            async with self._reserving:
                name = await asyncio.get_running_loop().run_in_executor(
                    None,
                    state.pool.reserve,
                    request.size_bytes,
                    set(state.handed_out.values()),
                    set(self._sizes_bytes.values()),
                )
                state.handed_out[request.rank] = name
        except StorageError as error:
            is_behind = isinstance(error, OutOfSpaceError) and bool(pending)
            return protocol.Slot(name=None, reason=str(error), busy=is_behind)
        return protocol.Slot(name=name)

    def filling(self, request: protocol.Filling) -> None:
        """A trainer fills the slot that it had ready."""
        checkpoint = self._checked(request.id)
        self._decider.begun(checkpoint.step)
        self._state.filling[request.rank] = checkpoint
        self._state.handed_out.pop(request.rank, None)

    async def want_spare(self, request: protocol.WantSpare) -> protocol.Slot:
        """A slot for a next image; none where all would take more than two whole images a rank."""
        state = self._state
        group = state.group
        if group is None or group.group != request.group or not state.has_ram:
            return protocol.Slot(name=None, reason="not now")
        self._sizes_bytes[request.rank] = request.size_bytes
        try:
            async with self._reserving:
                name = await asyncio.get_running_loop().run_in_executor(
                    None,
                    state.pool.spare,
                    request.size_bytes,
                    SLOTS_PER_RANK * self._whole_bytes(request, group.count),
                    set(state.handed_out.values()),
                    set(self._sizes_bytes.values()),
                )
                if name is not None:
                    state.handed_out[request.rank] = name
        except StorageError as error:
            return protocol.Slot(name=None, reason=str(error))
        return protocol.Slot(name=name)

    def _whole_bytes(self, request: protocol.WantSpare, count: int) -> int:
        """What all ranks save; those that did not tell yet are taken to save what this one does."""
        self._whole_sizes_bytes[request.rank] = request.whole_bytes
        unknown = max(count - len(self._whole_sizes_bytes), 0)
        return sum(self._whole_sizes_bytes.values()) + unknown * request.whole_bytes

    async def sealed(self, request: protocol.Sealed) -> None:
        """A part is whole; the last one of a checkpoint completes it."""
        checkpoint = self._checked(request.id)
        state = self._state
        self._decider.begun(checkpoint.step)
        state.filling.pop(request.rank, None)
        state.handed_out.pop(request.rank, None)
        if request.again and await self._keeper.is_committed(checkpoint):
            await state.notices.post(Notice(kind="committed", id=request.id))
            return
        if request.again and request.tier == "ram":
            # The agent before this one gave it up, or the tmpfs was cleared, before that was told.
            in_ram = await self._keeper.parts_in_ram()
            if request.rank not in in_ram.get(checkpoint, ()):
                reason = "its part is not in RAM any more"
                await state.notices.post(Notice(kind="failed", id=request.id, reason=reason))
                return
        entry = state.ledger.entry(checkpoint, request.part_count, state.clock.now())
        was_complete = entry.is_complete
        (entry.ram if request.tier == "ram" else entry.durable).add(request.rank)
        entry.is_durable_due |= request.durable
        if entry.is_complete and not was_complete:
            state.events.write("sealed", checkpoint, tier=request.tier)
            self._decider.taken(entry)
            await self._keeper.recycle()
        for missed in state.ledger.missed(request.rank, checkpoint.step, checkpoint.attempt):
            await self._miss(missed.id)
        state.wake()

    async def abandoned(self, request: protocol.Abandoned) -> None:
        """A trainer could not make its part: the checkpoint will not be."""
        checkpoint = self._checked(request.id)
        self._state.filling.pop(request.rank, None)
        self._state.handed_out.pop(request.rank, None)
        self._decider.begun(checkpoint.step)
        self._state.events.write("failed", checkpoint, reason=request.reason, rank=request.rank)
        if checkpoint in self._state.ledger.entries:
            await self._drop(checkpoint, request.reason)
        self._state.wake()

    async def tick(self) -> None:
        """Drops what can never be whole: a rank has gone on without saving it, or is gone."""
        group = self._state.group
        if group is None:
            return
        for entry in list(self._state.ledger):
            if entry.id.attempt == group.attempt and not entry.is_complete:
                missing = set(group.members) - entry.ram - entry.durable
                if any(self._has_passed(group, rank, entry.id.step) for rank in missing):
                    # A rank may have ended before it came to tell what it had sealed.
                    entry.ram |= (await self._keeper.parts_in_ram()).get(entry.id, set())
                    if not entry.is_complete:
                        await self._miss(entry.id)

    def _has_passed(self, group: Group, rank: int, step: int) -> bool:
        member, values = group.members[rank], self._state.words.values
        if rank in group.left or not member.is_alive:
            return True
        # The step first: a trainer says that it takes one before it publishes the next.
        published = values[words.step_word(member.seat)]
        return published > step and values[words.taken_word(member.seat)] < step

    async def group_changed(self) -> None:
        """Takes care of what the group before this one, if any, left behind."""
        state = self._state
        attempt = state.group.attempt if state.group is not None else None
        self._sizes_bytes.clear()
        self._whole_sizes_bytes.clear()
        in_ram = await self._keeper.parts_in_ram()
        for entry in list(state.ledger):
            if entry.id.attempt != attempt:
                # Its trainers may have ended before they came to tell what they had sealed.
                entry.ram |= in_ram.get(entry.id, set())
            if not entry.is_complete and entry.id.attempt != attempt:
                await self._drop(entry.id, "its trainers are gone")
        if state.group is None:
            await self._keeper.take_stock()
            state.ledger.want_newest_durable()

    async def _miss(self, checkpoint: CheckpointId) -> None:
        await self._drop(checkpoint, "the ranks did not meet at one step", kind="dropped")
        self._decider.missed()

    async def _drop(self, checkpoint: CheckpointId, reason: str, kind: str = "failed") -> None:
        entry = self._state.ledger.entries.pop(checkpoint)
        await self._keeper.drop_ram([entry])
        self._state.events.write("dropped", checkpoint, reason=reason)
        if entry.is_durable_due:
            notice = Notice(kind=kind, id=(checkpoint.step, checkpoint.attempt), reason=reason)
            await self._state.notices.post(notice)

    def _checked(self, found: tuple[int, int]) -> CheckpointId:
        checkpoint = CheckpointId(*found)
        group = self._state.group
        if group is None or group.attempt != checkpoint.attempt:
            raise FencedError(
                f"save {checkpoint}: attempt {checkpoint.attempt} is not the run's present one; "
                "stop this process"
            )
        if checkpoint.step < 0:
            raise InvalidArgumentError(f"save {checkpoint}: the step is negative")
        return checkpoint
