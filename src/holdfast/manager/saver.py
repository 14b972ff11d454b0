"""The background thread that makes images; the training thread copies at most, in `take`.

At most one save waits while another one is filled, so handing one over may wait for RAM. Where it
would wait for storage, or for an agent that does not answer, `has_room` tells so beforehand.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import deque
from typing import TypeVar

import msgspec

from holdfast.adapt.contract import Pinning
from holdfast.agent import protocol
from holdfast.clock import Clock
from holdfast.conditions import Condition
from holdfast.engine.saving.part import ChunkBytes, PartImages, write_part
from holdfast.errors import AgentUnavailableError, HoldfastError, StorageError
from holdfast.format.names import CheckpointId
from holdfast.manager.agent_session import AgentSession
from holdfast.manager.part_writer import FilledPart, PartWriter
from holdfast.manager.patience import SlotPatience
from holdfast.manager.planning import PartCopy
from holdfast.manager.progress import Progress
from holdfast.manager.ram_slots import RamSlots
from holdfast.manager.replica_writer import ReplicaWriter
from holdfast.manager.save_request import SaveRequest, reason_of
from holdfast.store.contract import Store
from holdfast.store.ram import SlotWriter

BUSY_SECS = 0.02
SKIPPED_MAX = 64
PATIENCE_SECS = 2.0
"""An agent that takes longer for an answer holds no training up."""

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


class Saver:
    """Owns the thread, and the mapped slots."""

    def __init__(
        self, session: AgentSession, durable: Store, progress: Progress, clock: Clock
    ) -> None:
        self._session = session
        self._durable = durable
        self._progress = progress
        self._clock = clock
        self._changed = Condition()
        self._waiting: SaveRequest | None = None
        self._skipped: deque[CheckpointId] = deque(maxlen=SKIPPED_MAX)
        self._is_at_storage = False
        self._asked_at: float | None = None
        self._is_closed = False
        self._has_ended = False
        self._is_getting_ready = False
        self._has_told_no_ram = False
        self._patience = SlotPatience(clock)
        self._slots = RamSlots(session, clock)
        self._parts = PartWriter(self._slots, durable, clock)
        self._copier = ReplicaWriter(session, clock)
        self._copying: tuple[PartCopy, ...] = ()
        self._next_slot: protocol.WantSpare | None = None
        self._next_copies: tuple[PartCopy, ...] = ()
        self._pin: Pinning = lambda memory: None
        self._thread = threading.Thread(target=self._run, name="holdfast-save", daemon=True)
        self._thread.start()

    def submit(self, job: SaveRequest) -> None:
        """Take over a save; wait while another one is waiting already.

        Where a slot is ready, the state is copied into it before this returns, and the snapshot is
        released: for the training thread. An exception that leaves this ends the save, see
        `SaveRequest`.
        """
        is_taken = False
        try:
            self._take(job)
            is_taken = True
        finally:
            if not is_taken:
                self._revoke(job, reason_of(sys.exc_info()[1]))

    def _take(self, job: SaveRequest) -> None:
        snapshot = job.snapshot
        self._progress.accept(job.plan.id, durable=job.is_durable_due, by_step=job.is_by_step)
        self._patience.note_taken()
        job.filled = filled = self._parts.begin(job.plan, snapshot, job.held)
        if filled is None and snapshot.is_borrowed:
            snapshot.bring_to_host()
        if filled is not None and not filled.draft.images.reused:
            job.copied = self._copier.begin(job.copies, job.held)
        # The thread tells the agent of it while this one copies.
        self._submit(job)
        if filled is not None:
            filled.fill(snapshot)
        for copied in job.copied:
            copied.fill(snapshot, self._clock)
        if filled is not None and filled.wait():
            snapshot.release()

    def _revoke(self, job: SaveRequest, reason: str) -> None:
        """End a save that an exception has interrupted on the training thread.

        Each step may follow on one that was done in part.
        """
        if job.is_handed_over:
            if job.snapshot.is_borrowed:
                # The training goes on and may change it, so only a whole copy counts.
                job.interruption = reason
            job.end()
            with self._changed:
                # The exception may have come before the thread was notified of the job.
                self._changed.notify_all()
            return
        self._progress.fail(job.plan.id, reason)
        self.skip(job.plan.id)
        job.drop()

    def forget(self) -> None:
        """The run goes on from elsewhere: the next save keeps nothing of the one before."""
        self._parts.forget()

    def get_ready(self) -> None:
        """A save is sealed, or has ended: a slot may be made ready for the next time."""
        with self._changed:
            self._is_getting_ready = True
            self._changed.notify_all()

    def expect(self, size_bytes: int, copies: tuple[PartCopy, ...]) -> None:
        """The first save will be of that size, and these copies will be made."""
        with self._changed:
            self._next_slot = self._wanted(size_bytes, size_bytes)
            self._next_copies = copies
        self.get_ready()

    def should_wait(self, *, is_saving: bool) -> bool:
        """Whether a save that may wait for a later step had better, for the training thread.

        So it is while a slot is made ready, and while earlier saves are on their way, whose end
        frees one; for so long only as that may take.
        """
        if self._is_getting_ready or self._patience.for_preparing():
            return True
        has_none = not self._slots.has_ready and self._session.place.ram_folder is not None
        return is_saving and has_none and self._patience.for_earlier_saves()

    def skip(self, checkpoint: CheckpointId) -> None:
        """A checkpoint that was due is not taken here: other ranks need not wait for it."""
        if not self._session.is_alone:
            with self._changed:
                self._skipped.append(checkpoint)
                self._changed.notify_all()

    def _submit(self, job: SaveRequest) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None or self._is_closed)
            job.is_handed_over, self._waiting = True, job
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Whether one more save fits; waits while an earlier one is filled into RAM alone."""
        with self._changed:
            while self._waiting is not None and not self._is_held_up():
                self._changed.wait(PATIENCE_SECS)
            return self._waiting is None

    def _is_held_up(self) -> bool:
        if self._asked_at is None:
            return self._is_at_storage
        return self._is_at_storage or self._clock.monotonic() - self._asked_at >= PATIENCE_SECS

    def close(self, timeout_secs: float) -> None:
        """Ends the thread after what it has; waits for it, but not for storage that hangs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            # Not `Thread.join`: a Ctrl-C in it takes a thread for ended that is not.
            self._changed.wait_for(lambda: self._has_ended, timeout_secs)
        if not self._has_ended:
            log.warning("a save that hangs in the storage is left behind; the process may end")
        else:
            self._slots.close()
            self._copier.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                job, self._waiting = self._waiting, None
                skipped = list(self._skipped)
                self._skipped.clear()
                is_getting_ready, self._is_getting_ready = self._is_getting_ready, False
                self._changed.notify_all()
            for checkpoint in skipped:
                self._tell_skipped(checkpoint)
            if job is not None:
                self._do(job)
                job = None
            elif self._is_closed:
                break
            elif is_getting_ready and self._next_slot is not None:
                self._prepare(self._next_slot)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _has_work(self) -> bool:
        is_wanted = self._is_closed or self._is_getting_ready
        return self._waiting is not None or bool(self._skipped) or is_wanted

    def _do(self, job: SaveRequest) -> None:
        self._copying, self._next_copies = (), ()
        tier = None
        try:
            tier = self._save(job)
        except Exception as error:
            # The top of a thread: whatever it was is told to the trainer, once.
            log.debug("save %s failed", job.plan.id, exc_info=True)
            is_lost = isinstance(error, AgentUnavailableError)
            self._give_up(job, f"{type(error).__name__}: {error}", is_lost=is_lost)
        finally:
            self._end_copies(job, is_in_ram=tier == "ram")
            self._next_slot, self._pin = self._slot_after(job), job.snapshot.pin
            job.snapshot.release()
            self._set_at_storage(False)
        self.get_ready()

    def _slot_after(self, job: SaveRequest) -> protocol.WantSpare | None:
        """What the next save will want, if it is like this one."""
        if self._session.place.ram_folder is None:
            return None
        return self._wanted(self._parts.size_of_next_bytes(job.plan), job.plan.layout.size_bytes)

    def _wanted(
        self, size_bytes: int, whole_bytes: int, copy_of: int | None = None
    ) -> protocol.WantSpare:
        return protocol.WantSpare(
            group=self._session.group,
            rank=self._session.rank,
            size_bytes=size_bytes,
            whole_bytes=whole_bytes,
            copy_of=copy_of,
        )

    def _prepare(self, request: protocol.WantSpare) -> None:
        """Gets slots ready for the next image, and for copies, if the agent has them to spare."""
        try:
            with self._patience.preparing():
                if not self._slots.is_ready(request.size_bytes):
                    slot = self._ask("spare", request, protocol.Slot)
                    if slot.name is not None:
                        self._slots.make_ready(slot.name, request.size_bytes, self._pin)
                if self._slots.has_ready:
                    self._copier.prepare(self._next_copies, self._spare_slot, self._pin)
        except HoldfastError as error:
            # The next save asks for a slot again, and tells what is wrong.
            log.debug("no slot is ready for the next image: %s", error)

    def _spare_slot(self, copy: PartCopy) -> str | None:
        size_bytes = copy.layout.size_bytes
        wanted = self._wanted(size_bytes, size_bytes, copy.rank)
        return self._ask("spare", wanted, protocol.Slot).name

    def _save(self, job: SaveRequest) -> str | None:
        """Makes the part, and tells of it; returns the tier, None where it goes nowhere."""
        tier = self._fill(job)
        if tier is None:
            self._progress.finish(job.plan.id)
            return None
        message = protocol.Sealed(
            rank=job.plan.rank,
            id=(job.plan.id.step, job.plan.id.attempt),
            part_count=job.plan.part_count,
            tier=tier,
            durable=job.is_durable_due,
        )
        self._progress.seal(job.plan.id, message)
        self._ask("sealed", message, protocol.Empty)
        self._progress.reported(job.plan.id)
        return tier

    def _begin_copies(self, job: SaveRequest, images: PartImages) -> tuple[int, ...]:
        """The ranks of whose parts copies are about to be made; the agent is told with the part.

        Where the rank's own part keeps images, others' will: what changed of them is pulled.
        """
        if not images.reused:
            self._copying = job.copies
            if job.filled is not None:
                self._copying = tuple(copied.copy for copied in job.copied)
            self._next_copies = job.copies
        return tuple(copy.rank for copy in self._copying)

    def _end_copies(self, job: SaveRequest, *, is_in_ram: bool) -> None:
        """Tells which copies were made; makes them now, where the state is still at hand."""
        plan = job.plan
        made = {copied.copy.rank for copied in job.copied if copied.finish()}
        if not self._copying:
            return
        number = plan.id.step, plan.id.attempt

        def slot_for(copy: PartCopy) -> str | None:
            size_bytes = copy.layout.size_bytes
            request = protocol.WantSlot(
                rank=plan.rank, id=number, size_bytes=size_bytes, copy_of=copy.rank
            )
            return self._ask("slot", request, protocol.Slot).name

        for copy in self._copying if is_in_ram and job.filled is None else ():
            try:
                if self._copier.make(copy, job.snapshot, slot_for):
                    made.add(copy.rank)
            except HoldfastError as error:
                log.debug("the part of rank %d is not copied here: %s", copy.rank, error)
        copies = tuple(copy.rank for copy in self._copying)
        with contextlib.suppress(HoldfastError):
            told = protocol.Copied(rank=plan.rank, id=number, copies=copies, made=tuple(made))
            self._ask("copied", told, protocol.Empty)

    def _fill(self, job: SaveRequest) -> str | None:
        """Writes the part to RAM, else to the durable tier; returns which, None for neither."""
        filled = job.filled or self._filled_here(job)
        if filled is not None:
            with contextlib.closing(filled):
                tier = self._seal(job, filled)
            if filled.wait():
                return tier
            if job.interruption is not None:
                self._give_up(job, job.interruption, is_lost=False)
                return None
        if not job.snapshot.is_on_host and self._session.place.ram_folder is not None:
            return self._fill_from_devices(job)
        self._slots.give_up_ready()
        if self._session.place.ram_folder is None:
            slot = self._want_slot(job, None)
            return self._go_without_ram(job, None, slot.reason)
        with self._parts.draft(self._slots.store(), job.plan, job.snapshot) as draft:
            slot = self._want_slot(job, draft.images)
            reason = slot.reason
            if slot.name is not None:
                try:
                    self._parts.write(draft, self._slots.store(slot.name), job.snapshot)
                    return "ram"
                except StorageError as error:
                    reason = str(error)
        return self._go_without_ram(job, None, reason)

    def _filled_here(self, job: SaveRequest) -> FilledPart | None:
        """Where no slot was ready in time for the training thread, one may be by now."""
        filled = self._parts.begin(job.plan, job.snapshot)
        if filled is not None:
            filled.fill(job.snapshot)
        return filled

    def _fill_from_devices(self, job: SaveRequest) -> str | None:
        """Has devices fill a slot by themselves; else the host copies it all."""
        plan = job.plan
        with self._parts.draft(self._slots.store(), plan, job.snapshot) as draft:
            filling, reason = self._slot_for_devices(job, draft.images)
            if filling is None:
                return self._go_without_ram(job, None, reason)
            filled = FilledPart(draft, filling, self._clock)
            with contextlib.closing(filled):
                try:
                    keep = bool(self._copying)
                    self._parts.seal_from_devices(filled, job.snapshot, keep=keep)
                    return "ram"
                except StorageError as error:
                    draft.leave()
                    chunks = filled.chunk_bytes() if filled.wait() else None
                    return self._go_without_ram(job, chunks, str(error))

    def _slot_for_devices(
        self, job: SaveRequest, images: PartImages
    ) -> tuple[SlotWriter | None, str]:
        """The slot that is ready, else one that the agent gives, else the reason for none."""
        size_bytes = images.own.size_bytes
        filling = self._slots.acquire(size_bytes)
        if filling is not None:
            with contextlib.ExitStack() as on_error:
                on_error.callback(filling.close)
                self._tell_filling(job, images)
                on_error.pop_all()
            return filling, ""
        self._slots.give_up_ready()
        slot = self._want_slot(job, images)
        if slot.name is None:
            return None, slot.reason
        try:
            return self._slots.store(slot.name).begin(size_bytes), ""
        except StorageError as error:
            return None, str(error)

    def _tell_filling(self, job: SaveRequest, images: PartImages) -> None:
        plan, copies = job.plan, self._begin_copies(job, images)
        number = plan.id.step, plan.id.attempt
        request = protocol.FillStarted(rank=plan.rank, id=number, copies=copies)
        self._ask("filling", request, protocol.Empty)

    def _seal(self, job: SaveRequest, filled: FilledPart) -> str | None:
        """Seals what is being copied; the tier, or None: it goes nowhere, or was not copied."""
        try:
            self._tell_filling(job, filled.draft.images)
            return "ram" if self._parts.seal(filled, job.snapshot) else None
        except StorageError as error:
            filled.draft.leave()
            if not filled.wait():
                return None
            # The slot's memory is this process's as long as it is mapped, whatever became of it.
            return self._go_without_ram(job, filled.chunk_bytes(), str(error))
        finally:
            # The training thread may be at it still, in the slot and in the snapshot.
            filled.wait()

    def _go_without_ram(
        self, job: SaveRequest, filled: ChunkBytes | None, reason: str
    ) -> str | None:
        """Writes the part to the durable tier; `filled` has its chunks where the state is gone."""
        if self._session.place.ram_folder is not None:
            self._tell_no_ram(reason)
        if not job.is_durable_due:
            self._abandon(job.plan.id, reason)
            return None
        self._set_at_storage(True)
        if filled is not None:
            write_part(self._durable, job.plan, filled)
            return "durable"
        with self._parts.draft(self._durable, job.plan, job.snapshot) as draft:
            self._parts.write(draft, self._durable, job.snapshot)
        return "durable"

    def _want_slot(self, job: SaveRequest, images: PartImages | None) -> protocol.Slot:
        """A slot for these images of the part; without them there is no RAM tier."""
        plan = job.plan
        own = plan.layout if images is None else images.own
        request = protocol.WantSlot(
            rank=plan.rank,
            id=(plan.id.step, plan.id.attempt),
            size_bytes=own.size_bytes,
            copies=() if images is None else self._begin_copies(job, images),
        )
        slot = self._ask("slot", request, protocol.Slot)
        while slot.busy:
            if self._is_closed:
                raise StorageError("closed while the durable tier was behind; it may hang")
            self._set_at_storage(True)
            # Each checkpoint ahead becomes durable or fails, and either makes room. Where storage
            # hangs neither comes: then closing ends the wait.
            self._clock.sleep(BUSY_SECS)
            slot = self._ask("slot", request, protocol.Slot)
        self._set_at_storage(False)
        return slot

    def _ask(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """A call of the agent, of which `has_room` sees how long it takes."""
        self._set_asked_at(self._clock.monotonic())
        try:
            return self._session.call(name, message, kind)
        finally:
            self._set_asked_at(None)

    def _set_asked_at(self, asked_at: float | None) -> None:
        with self._changed:
            self._asked_at = asked_at

    def _set_at_storage(self, is_at_storage: bool) -> None:
        with self._changed:
            self._is_at_storage = is_at_storage
            self._changed.notify_all()

    def _tell_no_ram(self, reason: str) -> None:
        if self._has_told_no_ram:
            return
        self._has_told_no_ram = True
        log.warning("no RAM for checkpoints, they go straight to the durable tier: %s", reason)
        self._session.report_event("ram_unavailable", reason=reason)

    def _tell_skipped(self, checkpoint: CheckpointId) -> None:
        reason = f"rank {self._session.rank} had earlier ones still on their way"
        with contextlib.suppress(HoldfastError):
            self._abandon(checkpoint, reason, is_skipped=True)

    def _abandon(self, checkpoint: CheckpointId, reason: str, *, is_skipped: bool = False) -> None:
        number = checkpoint.step, checkpoint.attempt
        message = protocol.Abandoned(
            rank=self._session.rank, id=number, reason=reason, skipped=is_skipped
        )
        self._ask("abandoned", message, protocol.Empty)

    def _give_up(self, job: SaveRequest, reason: str, *, is_lost: bool) -> None:
        self._progress.fail(job.plan.id, reason)
        if is_lost:
            # Nobody is there to be told; the next agent sees by itself what is not whole.
            return
        try:
            self._abandon(job.plan.id, reason)
        except HoldfastError as error:
            log.warning("the agent was not told that step %d failed: %s", job.plan.id.step, error)
