"""The background thread that makes images; the training thread copies at most, by `fill_now`.

At most one save waits while another one is filled, so handing one over may wait for RAM. Where it
would wait for storage, or for an agent that does not answer, `has_room` tells so beforehand.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from holdfast.adapt.contract import Pinning, Snapshot
from holdfast.agent import protocol
from holdfast.clock import Clock
from holdfast.engine.save import (
    ChunkBytes,
    PartPlan,
    bytes_in_slot,
    fill_slot,
    seal_slot,
    write_part,
)
from holdfast.errors import AgentUnavailableError, DeviceError, HoldfastError, StorageError
from holdfast.format.names import image_key
from holdfast.manager.device_filling import DeviceFilling
from holdfast.manager.link import Link
from holdfast.manager.progress import Progress
from holdfast.manager.ram_slots import RamSlots
from holdfast.store.contract import Store
from holdfast.store.ram import Filling

BUSY_SECS = 0.02
CLOSE_SECS = 300.0
PATIENCE_SECS = 2.0
"""An agent that takes longer for an answer holds no training up."""

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One save: what to write, and where it is due; the state, fixed, or else in a slot already."""

    plan: PartPlan
    snapshot: Snapshot
    is_durable_due: bool
    filling: Filling | None


class Saver:
    """Owns the thread, and the mapped slots."""

    def __init__(self, link: Link, durable: Store, progress: Progress, clock: Clock) -> None:
        self._link = link
        self._durable = durable
        self._progress = progress
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._is_at_storage = False
        self._asked_at: float | None = None
        self._is_closed = False
        self._is_getting_ready = False
        self._has_told_no_ram = False
        self._slots = RamSlots(link, clock)
        self._next_slot: protocol.WantSpare | None = None
        self._pin: Pinning | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-save", daemon=True)
        self._thread.start()

    def fill_now(self, plan: PartPlan, snapshot: Snapshot) -> Filling | None:
        """Copies the state into the slot that is ready, if one is; for the training thread.

        The snapshot is let go of then. What it borrows is the training's own again in any case.
        """
        is_now = snapshot.is_on_host or snapshot.is_borrowed
        filling = self._slots.take(plan.layout.size_bytes) if is_now else None
        if filling is not None:
            try:
                self._copy_now(filling, plan, snapshot)
            except (StorageError, DeviceError) as error:
                log.warning("the slot for step %d cannot be filled: %s", plan.id.step, error)
                filling.close()
            else:
                snapshot.release()
                return filling
        if snapshot.is_borrowed:
            snapshot.bring_to_host()
        return None

    def _copy_now(self, filling: Filling, plan: PartPlan, snapshot: Snapshot) -> None:
        if not snapshot.is_borrowed:
            fill_slot(filling, plan.layout, snapshot.chunk_bytes)
            return
        with DeviceFilling(filling, plan.layout, snapshot, self._clock) as arriving:
            arriving.wait(plan.layout.size_bytes)

    def get_ready(self) -> None:
        """Nothing is being saved any more: a slot may be made ready for the next time."""
        with self._changed:
            self._is_getting_ready = True
            self._changed.notify_all()

    def submit(self, job: Job) -> None:
        """Hands over a save; waits while another one is waiting already."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None or self._is_closed)
            self._waiting = job
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Whether one more save can be handed over; waits while an earlier one is filled into RAM.

        Where an earlier one waits for the durable tier, or for the agent, there is no room.
        """
        with self._changed:
            while self._waiting is not None and not self._is_held_up():
                self._changed.wait(PATIENCE_SECS)
            return self._waiting is None

    def _is_held_up(self) -> bool:
        if self._asked_at is None:
            return self._is_at_storage
        return self._is_at_storage or self._clock.monotonic() - self._asked_at >= PATIENCE_SECS

    def close(self) -> None:
        """Ends the thread after what it has; waits for it, but not for storage that hangs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECS)
        if self._thread.is_alive():
            log.warning("a save that hangs in the storage is left behind; the process may end")
        else:
            self._slots.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                job, self._waiting = self._waiting, None
                is_getting_ready, self._is_getting_ready = self._is_getting_ready, False
                self._changed.notify_all()
            if job is not None:
                self._do(job)
                job = None
            elif self._is_closed:
                return
            elif is_getting_ready and self._next_slot is not None:
                self._prepare(self._next_slot)

    def _has_work(self) -> bool:
        return self._waiting is not None or self._is_closed or self._is_getting_ready

    def _do(self, job: Job) -> None:
        try:
            self._save(job)
        except Exception as error:
            # The top of a thread: whatever it was is told to the trainer, once.
            log.debug("save %s failed", job.plan.id, exc_info=True)
            is_lost = isinstance(error, AgentUnavailableError)
            self._give_up(job, f"{type(error).__name__}: {error}", is_lost)
        finally:
            self._next_slot, self._pin = self._slot_after(job), job.snapshot.pin
            job.snapshot.release()
            self._set_at_storage(False)
        if self._progress.is_idle:
            self.get_ready()

    def _slot_after(self, job: Job) -> protocol.WantSpare | None:
        """What the next save will want, if it is like this one."""
        if self._link.place.ram_folder is None:
            return None
        size_bytes = job.plan.layout.size_bytes
        return protocol.WantSpare(group=self._link.group, rank=job.plan.rank, size_bytes=size_bytes)

    def _prepare(self, request: protocol.WantSpare) -> None:
        """Gets a slot ready for the next image, if the agent has one to spare."""
        if self._slots.is_ready(request.size_bytes):
            return
        try:
            slot = self._ask("spare", request, protocol.Slot)
            if slot.name is not None and self._pin is not None:
                self._slots.make_ready(slot.name, request.size_bytes, self._pin)
        except HoldfastError as error:
            # The next save asks for a slot again, and tells what is wrong.
            log.debug("no slot is ready for the next image: %s", error)

    def _save(self, job: Job) -> None:
        tier = self._fill(job)
        if tier is None:
            self._progress.finish(job.plan.id)
            return
        message = protocol.Sealed(
            rank=job.plan.rank,
            id=(job.plan.id.step, job.plan.id.attempt),
            part_count=job.plan.part_count,
            tier=tier,
            durable=job.is_durable_due,
        )
        self._progress.seal(job.plan.id, message)
        self._ask("sealed", message, protocol.Empty)

    def _fill(self, job: Job) -> str | None:
        """Writes the part to RAM, else to the durable tier; returns which, None for neither."""
        # Where it was not ready in time for the training thread, it may be by now.
        filling = job.filling or self.fill_now(job.plan, job.snapshot)
        if filling is not None:
            with contextlib.closing(filling):
                return self._seal(job, filling)
        if not job.snapshot.is_on_host:
            return self._fill_from_devices(job)
        slot = self._want_slot(job.plan)
        reason = slot.reason
        if slot.name is not None:
            try:
                write_part(self._slots.store(slot.name), job.plan, job.snapshot.chunk_bytes)
                return "ram"
            except StorageError as error:
                reason = str(error)
                self._leave_ram(job.plan)
        return self._go_without_ram(job, job.snapshot.chunk_bytes, reason)

    def _fill_from_devices(self, job: Job) -> str | None:
        filling, reason = self._slot_for_devices(job.plan)
        if filling is None:
            return self._go_without_ram(job, job.snapshot.chunk_bytes, reason)
        arriving = DeviceFilling(filling, job.plan.layout, job.snapshot, self._clock)
        with contextlib.closing(filling):
            try:
                with arriving:
                    seal_slot(self._slots.store(), filling, job.plan, arriving.wait)
                return "ram"
            except StorageError as error:
                self._leave_ram(job.plan)
                reason = str(error)
            return self._go_without_ram(job, arriving.chunk_bytes(), reason)

    def _slot_for_devices(self, plan: PartPlan) -> tuple[Filling | None, str]:
        """The slot that is ready, else one that the agent gives, else the reason for none."""
        filling = self._slots.take(plan.layout.size_bytes)
        if filling is not None:
            with contextlib.ExitStack() as on_error:
                on_error.callback(filling.close)
                self._tell_filling(plan)
                on_error.pop_all()
            return filling, ""
        slot = self._want_slot(plan)
        if slot.name is None:
            return None, slot.reason
        try:
            return self._slots.store(slot.name).begin(plan.layout.size_bytes), ""
        except StorageError as error:
            return None, str(error)

    def _tell_filling(self, plan: PartPlan) -> None:
        request = protocol.Filling(rank=plan.rank, id=(plan.id.step, plan.id.attempt))
        self._ask("filling", request, protocol.Empty)

    def _seal(self, job: Job, filling: Filling) -> str | None:
        plan = job.plan
        self._tell_filling(plan)
        try:
            if not filling.is_current:
                raise StorageError("the RAM tier was removed while the state was copied into it")
            seal_slot(self._slots.store(), filling, plan)
            return "ram"
        except StorageError as error:
            self._leave_ram(plan)
            # The slot's memory is this process's as long as it is mapped, whatever became of it.
            return self._go_without_ram(job, bytes_in_slot(filling), str(error))

    def _leave_ram(self, plan: PartPlan) -> None:
        """An image whose record found no room is no part: nobody else would free its slot."""
        with contextlib.suppress(StorageError):
            self._slots.store().delete(image_key(plan.id, plan.rank, plan.part_count))

    def _go_without_ram(self, job: Job, chunk_bytes: ChunkBytes, reason: str) -> str | None:
        if self._link.place.ram_folder is not None:
            self._tell_no_ram(reason)
        if not job.is_durable_due:
            self._abandon(job, reason)
            return None
        self._set_at_storage(True)
        write_part(self._durable, job.plan, chunk_bytes)
        return "durable"

    def _want_slot(self, plan: PartPlan) -> protocol.Slot:
        request = protocol.WantSlot(
            rank=plan.rank,
            id=(plan.id.step, plan.id.attempt),
            size_bytes=plan.layout.size_bytes,
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
            return self._link.call(name, message, kind)
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
        self._link.tell("ram_unavailable", reason=reason)

    def _abandon(self, job: Job, reason: str) -> None:
        message = protocol.Abandoned(
            rank=job.plan.rank, id=(job.plan.id.step, job.plan.id.attempt), reason=reason
        )
        self._ask("abandoned", message, protocol.Empty)

    def _give_up(self, job: Job, reason: str, is_lost: bool) -> None:
        self._progress.fail(job.plan.id, reason)
        if is_lost:
            # Nobody is there to be told; the next agent sees by itself what is not whole.
            return
        try:
            self._abandon(job, reason)
        except HoldfastError as error:
            log.warning("the agent was not told that step %d failed: %s", job.plan.id.step, error)
