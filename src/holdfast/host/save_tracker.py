"""Track the saves of this host's trainers: slots, and parts begun, sealed or abandoned.

Each report becomes an input of the coordination, which alone decides the fate of a checkpoint.
"""

from __future__ import annotations

import asyncio

from holdfast.coordination import inputs
from holdfast.errors import FencedError, InvalidArgumentError, OutOfSpaceError, StorageError
from holdfast.format.names import CheckpointId
from holdfast.host import protocol
from holdfast.host.coordinator import Coordinator
from holdfast.host.protocol import Notice
from holdfast.host.retention import Retention
from holdfast.host.slot_allocator import ReplicaOf, User
from holdfast.host.state import AgentState
from holdfast.host.storage_worker import StorageWorker
from holdfast.observe.events.schema import CheckpointFailed, PartSaved

IDLE_SECS = 10.0
"""How long a rank waits for a slot while this host writes nothing, before it does without RAM."""


class SaveTracker:
    """The saves of this host's trainers; owned by the event loop."""

    def __init__(
        self,
        state: AgentState,
        coordinator: Coordinator,
        storage_worker: StorageWorker,
        retention: Retention,
    ) -> None:
        self._state = state
        self._coordinator = coordinator
        self._storage_worker = storage_worker
        self._retention = retention
        self._idle_since_secs: dict[int, float] = {}
        """Since when ranks wait for a slot while nothing is written here."""

    async def want_slot(self, request: protocol.WantSlot) -> protocol.Slot:
        """Return a slot for one image; none, with the reason, if RAM has no room for it."""
        checkpoint = self._checked(request.id)
        state = self._state
        if request.copy_of is not None:
            return await self._reserve(ReplicaOf(request.copy_of), request.size_bytes, 0)
        self._begun(request.rank, checkpoint, request.copies)
        if not state.has_ram:
            return protocol.Slot(name=None, reason="the run has no RAM tier")
        pending = self._coordinator.node.pending_count(checkpoint)
        # Each of them has images of all ranks here.
        images_size_bytes = request.size_bytes * self._rank_count
        slot = protocol.Slot(name=None, reason="the durable tier is behind", busy=True)
        if pending < protocol.pending_limit(images_size_bytes):
            slot = await self._reserve(request.rank, request.size_bytes, pending)
        return self._bounded(request.rank, slot, pending)

    def _bounded(self, rank: int, slot: protocol.Slot, pending: int) -> protocol.Slot:
        """Return the answer to a rank that asks for a slot; end its wait if nothing is written.

        Pending checkpoints end as storage writes them. If other hosts are silent, this host has
        nothing to write, and the wait might last as long as the silence.
        """
        now_secs, node = self._state.clock.monotonic(), self._coordinator.node
        if not slot.busy or node.is_writing:
            self._idle_since_secs.pop(rank, None)
        elif now_secs - self._idle_since_secs.setdefault(rank, now_secs) >= IDLE_SECS:
            reason = (
                f"{pending} earlier checkpoints wait for other hosts, and nothing was written for "
                f"{IDLE_SECS:.0f} s"
            )
            return protocol.Slot(name=None, reason=reason)
        return slot

    @property
    def _rank_count(self) -> int:
        """The number of ranks on this host."""
        return max(1, len(self._state.group.members)) if self._state.group is not None else 1

    async def _reserve(self, user: User, size_bytes: int, pending: int) -> protocol.Slot:
        loop = asyncio.get_running_loop()
        try:
            name = await loop.run_in_executor(None, self._state.slots.reserve, user, size_bytes)
        except StorageError as error:
            # Slots become free as pending checkpoints are committed, so a later save may find room.
            is_behind = isinstance(error, OutOfSpaceError) and pending > 0
            return protocol.Slot(name=None, reason=str(error), busy=is_behind)
        return protocol.Slot(name=name)

    def filling(self, request: protocol.FillStarted) -> None:
        """Record that a trainer fills its spare slot."""
        self._begun(request.rank, self._checked(request.id), request.copies)

    def copied(self, request: protocol.Copied) -> None:
        """Record the end of the copies of other ranks' parts that a trainer makes."""
        checkpoint, state = self._checked(request.id), self._state
        is_held = self._coordinator.node.holds(checkpoint)
        for part in request.copies:
            is_made = part in request.made and is_held
            slot = state.slots.assign_replica(checkpoint, part) if is_made else None
            if not state.local_replicas.end(checkpoint, part, slot):
                # It is not needed, or was not made: the slot is under one of these two holders.
                state.slots.release((checkpoint, part))
                state.slots.release(ReplicaOf(part))

    async def want_spare(self, request: protocol.WantSpare) -> protocol.Slot:
        """Return a slot for a next image; none if all slots would exceed two images per rank."""
        state = self._state
        group = state.group
        if group is None or group.group != request.group or not state.has_ram:
            return protocol.Slot(name=None, reason="not now")
        loop = asyncio.get_running_loop()
        try:
            name = await loop.run_in_executor(
                None,
                state.slots.spare,
                request.rank if request.copy_of is None else ReplicaOf(request.copy_of),
                request.size_bytes,
                request.whole_bytes,
                len(group.members),
            )
        except StorageError as error:
            return protocol.Slot(name=None, reason=str(error))
        return protocol.Slot(name=name)

    async def sealed(self, request: protocol.Sealed) -> None:
        """Record that a part is whole in a tier.

        From now on a checkpoint of this attempt may be committed, by any host.

        Raises:
            FencedError: the checkpoint belongs to another attempt than the present one.
        """
        checkpoint = self._checked(request.id)
        state = self._state
        self._storage_worker.opening.forget_listing()
        self._ended(request.rank)
        if not request.again:
            self._report_part(request, checkpoint)
        # The previous agent may have committed it before it could notify the trainer.
        if request.again and await self._retention.is_committed(checkpoint):
            state.notices.post(Notice(kind="committed", id=request.id))
            return
        if request.again and request.tier == "ram":
            # The previous agent discarded it, or the tmpfs was cleared, before the trainer was
            # notified.
            listed = self._storage_worker.in_ram().get(checkpoint)
            if listed is None or request.rank not in listed.ranks:
                reason = "its part is no longer in RAM"
                state.notices.post(Notice(kind="failed", id=request.id, reason=reason))
                return
        self._coordinator.submit(
            inputs.PartSealed(
                rank=request.rank,
                id=checkpoint,
                part_count=request.part_count,
                in_ram=request.tier == "ram",
                is_due=request.durable,
            )
        )

    async def abandoned(self, request: protocol.Abandoned) -> None:
        """Record that a trainer skipped its part or could not make it; the checkpoint ends."""
        checkpoint = self._checked(request.id)
        state, group = self._state, self._state.group
        assert group is not None
        if not request.skipped:
            self._ended(request.rank)
            state.events.write(
                CheckpointFailed(
                    step=checkpoint.step,
                    attempt=checkpoint.attempt.number,
                    rank=request.rank,
                    reason=request.reason,
                )
            )
        self._coordinator.submit(
            inputs.PartAbandoned(request.rank, checkpoint, group.count, request.reason)
        )

    def _report_part(self, request: protocol.Sealed, checkpoint: CheckpointId) -> None:
        self._state.sealing_secs = request.secs
        self._state.events.write(
            PartSaved(
                step=checkpoint.step,
                attempt=checkpoint.attempt.number,
                rank=request.rank,
                tier=request.tier,
                blocked_secs=request.blocked_secs,
                secs=request.secs,
                bytes=request.written_bytes,
                reused_bytes=request.reused_bytes,
            )
        )

    def _begun(self, rank: int, checkpoint: CheckpointId, copies: tuple[int, ...]) -> None:
        state = self._state
        state.filling[rank] = checkpoint
        state.step_meter.note_save()
        state.slots.release(rank)
        is_held = self._coordinator.node.holds
        for unneeded in state.local_replicas.begin(rank, checkpoint, copies, is_held):
            state.slots.release(unneeded)
        offered = self._coordinator.node.replicas_offered_by(rank)
        if offered is not None and offered != frozenset(copies):
            self._coordinator.submit(inputs.CopiesOffered(rank, frozenset(copies)))
        self._coordinator.submit(inputs.PartBegun(rank, checkpoint))

    def _ended(self, rank: int) -> None:
        self._idle_since_secs.pop(rank, None)
        self._state.filling.pop(rank, None)
        self._state.slots.release(rank)

    def _checked(self, checkpoint: CheckpointId) -> CheckpointId:
        group = self._state.group
        if group is None or group.attempt != checkpoint.attempt:
            raise FencedError(
                f"save {checkpoint}: attempt {checkpoint.attempt} is not the run's present one; "
                "stop this process"
            )
        if checkpoint.step < 0:
            raise InvalidArgumentError(f"save {checkpoint}: the step is negative")
        return checkpoint
