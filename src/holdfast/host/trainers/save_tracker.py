"""Track the saves of this host's trainers: slots, and parts begun, sealed or abandoned.

Each report becomes an input of the coordination, which alone decides the fate of a checkpoint.
"""

from __future__ import annotations

import asyncio

from holdfast.coordination import inputs
from holdfast.coordination.effects import Reached
from holdfast.coordination.messages import CheckpointStatus
from holdfast.errors import FencedError, InvalidArgumentError, OutOfSpaceError, StorageError
from holdfast.format.names import CheckpointId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.driver.driver import Driver
from holdfast.host.tiers.ram_tier import RamTier
from holdfast.host.tiers.slot_allocator import ReplicaOf, User
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.wire import protocol
from holdfast.host.wire.protocol import Notice, PartTier
from holdfast.observe.events.schema import (
    CheckpointDropped,
    CheckpointFailed,
    CheckpointProtected,
    CheckpointSealed,
    PartSaved,
)

RECORDED_MAX = 10_000
IDLE_SECS = 10.0
"""How long a rank waits for a slot while this host writes nothing, before it does without RAM."""


class SaveTracker:
    """The saves of this host's trainers; owned by the event loop."""

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        driver: Driver,
        storage_worker: StorageWorker,
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._driver = driver
        self._storage_worker = storage_worker
        self._idle_since_secs: dict[int, float] = {}
        """Since when ranks wait for a slot while nothing is written here."""
        self._recorded: dict[tuple[CheckpointId, CheckpointStatus], None] = {}
        """The newest statuses that are in the events."""

    async def want_slot(self, request: protocol.WantSlot) -> protocol.Slot:
        """Return a slot for one image; none, with the reason, if RAM has no room for it."""
        checkpoint = self._checked(request.id)
        if request.copy_of is not None:
            return await self._reserve(ReplicaOf(request.copy_of), request.size_bytes, 0)
        self._begun(request.rank, checkpoint, request.copies)
        if not self._trainers.job.has_ram:
            return protocol.Slot(name=None, reason="the run has no RAM tier")
        pending = self._driver.view.waiting_count(checkpoint)
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
        now_secs = self._run.clock.monotonic()
        if not slot.busy or self._driver.view.is_writing:
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
        group = self._trainers.group
        return max(1, len(group.members)) if group is not None else 1

    async def _reserve(self, user: User, size_bytes: int, pending: int) -> protocol.Slot:
        loop = asyncio.get_running_loop()
        try:
            name = await loop.run_in_executor(None, self._ram.slots.reserve, user, size_bytes)
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
        checkpoint = self._checked(request.id)
        is_held = self._driver.view.holds(checkpoint)
        for part in request.copies:
            is_made = part in request.made and is_held
            slot = self._ram.slots.assign_replica(checkpoint, part) if is_made else None
            if not self._ram.replicas.end(checkpoint, part, slot):
                # It is not needed, or was not made: the slot is under one of these two holders.
                self._ram.slots.release((checkpoint, part))
                self._ram.slots.release(ReplicaOf(part))

    async def want_spare(self, request: protocol.WantSpare) -> protocol.Slot:
        """Return a slot for a next image; none if all slots would exceed two images per rank."""
        group = self._trainers.group
        if group is None or group.group != request.group or not self._trainers.job.has_ram:
            return protocol.Slot(name=None, reason="not now")
        loop = asyncio.get_running_loop()
        try:
            name = await loop.run_in_executor(
                None,
                self._ram.slots.spare,
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
        self._storage_worker.opening.forget_listing()
        self._ended(request.rank)
        if not request.again:
            self._report_part(request, checkpoint)
        # The previous agent may have committed it before it could notify the trainer.
        if request.again and await self._storage_worker.is_committed(checkpoint):
            self._trainers.notices.post(Notice(kind="committed", id=request.id))
            return
        if request.again and request.tier is PartTier.RAM:
            # The previous agent dropped it, or the tmpfs was cleared, before the trainer was
            # notified. Whether that is a failure depends on how the save was decided.
            listed = self._ram.checkpoints().get(checkpoint)
            if listed is None or request.rank not in listed.ranks:
                reason = "its part is no longer in RAM"
                self._trainers.notices.post(Notice(kind="dropped", id=request.id, reason=reason))
                return
        self._driver.submit(
            inputs.PartSealed(
                rank=request.rank,
                id=checkpoint,
                part_count=request.part_count,
                in_ram=request.tier is PartTier.RAM,
                is_due=request.durable,
            )
        )

    async def abandoned(self, request: protocol.Abandoned) -> None:
        """Record that a trainer skipped its part or could not make it; the checkpoint ends."""
        checkpoint = self._checked(request.id)
        group = self._trainers.group
        assert group is not None
        if not request.skipped:
            self._ended(request.rank)
            self._run.events.write(
                CheckpointFailed(
                    step=checkpoint.step,
                    attempt=checkpoint.attempt.number,
                    rank=request.rank,
                    reason=request.reason,
                )
            )
        self._driver.submit(
            inputs.PartAbandoned(request.rank, checkpoint, group.count, request.reason)
        )

    def reached(self, effect: Reached) -> None:
        """Record the status that a checkpoint has reached, each once."""
        status = effect.id, effect.status
        if status in self._recorded:
            # A leader reports what it leads anew with each attempt, also of earlier ones.
            return
        self._recorded[status] = None
        while len(self._recorded) > RECORDED_MAX:
            del self._recorded[next(iter(self._recorded))]
        events, step, attempt = self._run.events, effect.id.step, effect.id.attempt.number
        match effect.status:
            case CheckpointStatus.COMPLETE:
                tier = PartTier.RAM if self._is_in_ram(effect.id) else PartTier.DURABLE
                events.write(CheckpointSealed(step=step, attempt=attempt, tier=tier))
            case CheckpointStatus.PROTECTED if self._driver.view.lead.has_copies:
                events.write(CheckpointProtected(step=step, attempt=attempt))
            case CheckpointStatus.FAILED:
                events.write(CheckpointFailed(step=step, attempt=attempt, reason=effect.reason))
            case CheckpointStatus.DROPPED:
                events.write(CheckpointDropped(step=step, attempt=attempt, reason=effect.reason))

    def _is_in_ram(self, checkpoint: CheckpointId) -> bool:
        tracked = self._driver.view.lead.checkpoints
        return any(c.id == checkpoint and c.is_in_ram for c in tracked)

    def _report_part(self, request: protocol.Sealed, checkpoint: CheckpointId) -> None:
        self._run.events.write(
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
        self._trainers.filling[rank] = checkpoint
        self._trainers.meter.note_save()
        self._ram.slots.release(rank)
        is_held = self._driver.view.holds
        for unneeded in self._ram.replicas.begin(rank, checkpoint, copies, is_held):
            self._ram.slots.release(unneeded)
        offers = self._driver.view.offers
        if offers is not None and offers.get(rank, frozenset()) != frozenset(copies):
            self._driver.submit(inputs.CopiesOffered(rank, frozenset(copies)))
        self._driver.submit(inputs.PartBegun(rank, checkpoint))

    def _ended(self, rank: int) -> None:
        self._idle_since_secs.pop(rank, None)
        self._trainers.filling.pop(rank, None)
        self._ram.slots.release(rank)

    def _checked(self, checkpoint: CheckpointId) -> CheckpointId:
        group = self._trainers.group
        if group is None or group.attempt != checkpoint.attempt:
            raise FencedError(
                f"save {checkpoint}: attempt {checkpoint.attempt} is not the run's present one; "
                "stop this process"
            )
        if checkpoint.step < 0:
            raise InvalidArgumentError(f"save {checkpoint}: the step is negative")
        return checkpoint
