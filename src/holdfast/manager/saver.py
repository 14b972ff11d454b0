"""Write images on a background thread; the training thread at most copies the state, in `submit`.

Invariants:
- At most one save waits while another one is written, so `submit` may wait for RAM. `has_room`
  reports beforehand if it would wait for storage or for an agent that does not answer.
- Each submitted save ends: as sealed, failed or abandoned.

Assumes that `submit`, `expect`, `forget` and `close` are called on the training thread only.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import deque
from typing import TypeVar

import msgspec

from holdfast.adapt.contract import Hold, Pinning
from holdfast.agent import protocol
from holdfast.clock import Clock
from holdfast.conditions import Condition
from holdfast.engine.saving.part import ChunkBytes, PartImages, write_part
from holdfast.errors import AgentUnavailableError, HoldfastError, StorageError
from holdfast.events.schema import RamUnavailable
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
"""How long the training thread waits for an agent's answer before it skips the save."""

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


class Saver:
    """The saver's thread with its queue of one save, and the mapped slots, which it owns."""

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
        self._has_warned_no_ram = False
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

    def submit(self, request: SaveRequest) -> None:
        """Accept a save; wait while another one is already waiting.

        Called on the training thread. If a slot is prepared, the state is copied into it and the
        snapshot is released before this returns. An exception that leaves this call ends the save;
        see `SaveRequest`.
        """
        is_taken = False
        try:
            self._take(request)
            is_taken = True
        finally:
            request.returned_secs = self._clock.monotonic()
            if not is_taken:
                self._revoke(request, reason_of(sys.exc_info()[1]))

    def _take(self, request: SaveRequest) -> None:
        snapshot = request.snapshot
        self._progress.accept(
            request.plan.id, durable=request.is_durable_due, by_step=request.is_by_step
        )
        self._patience.note_taken()
        request.filled = filled = self._parts.begin(request.plan, snapshot, request.held)
        if filled is None and snapshot.hold is Hold.BORROWED:
            snapshot.secure()
        if filled is not None and not filled.draft.images.reused:
            request.copied = self._copier.begin(request.copies, request.held)
        # The saver's thread reports the save to the agent while this thread copies.
        self._submit(request)
        if filled is not None:
            filled.fill(snapshot)
        for copied in request.copied:
            copied.fill(snapshot, self._clock)
        if filled is not None and filled.wait():
            snapshot.release()

    def _revoke(self, request: SaveRequest, reason: str) -> None:
        """End a save that an exception has interrupted on the training thread.

        The interrupted call may have completed any of its steps in part.
        """
        if request.is_handed_over:
            if request.snapshot.hold is Hold.BORROWED:
                # The training continues and may change a borrowed state, so only a copy that is
                # already whole can be saved.
                request.interruption = reason
            request.end()
            with self._changed:
                # The exception may have been raised before the thread was notified.
                self._changed.notify_all()
            return
        self._progress.fail(request.plan.id, reason)
        self.skip(request.plan.id)
        request.drop()

    def forget(self) -> None:
        """Reuse nothing for the next save, because the run continues from another checkpoint."""
        self._parts.forget()

    def get_ready(self) -> None:
        """Prepare a slot for the next save: one is sealed or has ended, so a slot may be free."""
        with self._changed:
            self._is_getting_ready = True
            self._changed.notify_all()

    def expect(self, size_bytes: int, copies: tuple[PartCopy, ...]) -> None:
        """Prepare slots for the first save, before its state is known.

        Args:
            size_bytes: The size of this rank's image.
            copies: The replicas that this rank will make.
        """
        with self._changed:
            self._next_slot = self._wanted(size_bytes, size_bytes)
            self._next_copies = copies
        self.get_ready()

    def should_wait(self, *, is_saving: bool) -> bool:
        """Return whether to defer a save that may wait for a later step.

        Called on the training thread. A save is deferred while a slot is being prepared, and while
        earlier saves are in progress whose end frees a slot; `SlotPatience` bounds both.

        Args:
            is_saving: Whether earlier saves are in progress.
        """
        if self._is_getting_ready or self._patience.for_preparing():
            return True
        has_none = not self._slots.has_ready and self._session.place.ram_folder is not None
        return is_saving and has_none and self._patience.for_earlier_saves()

    def skip(self, checkpoint: CheckpointId) -> None:
        """Report that this rank skips a due checkpoint, so that other ranks do not wait for it."""
        if not self._session.is_alone:
            with self._changed:
                self._skipped.append(checkpoint)
                self._changed.notify_all()

    def _submit(self, request: SaveRequest) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None or self._is_closed)
            request.is_handed_over, self._waiting = True, request
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Return whether one more save can be submitted without waiting for storage.

        The call waits while an earlier save is copied into RAM, which is short and bounded.
        """
        with self._changed:
            while self._waiting is not None and not self._is_held_up():
                self._changed.wait(PATIENCE_SECS)
            return self._waiting is None

    def _is_held_up(self) -> bool:
        if self._asked_at is None:
            return self._is_at_storage
        return self._is_at_storage or self._clock.monotonic() - self._asked_at >= PATIENCE_SECS

    def close(self, timeout_secs: float) -> None:
        """End the thread after the saves it has, and release the slots.

        If the thread has not ended after `timeout_secs`, because storage hangs, it is abandoned
        with a warning; it ends with the process.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            # Not `Thread.join`: a Ctrl-C during it marks a running thread as ended.
            self._changed.wait_for(lambda: self._has_ended, timeout_secs)
        if not self._has_ended:
            log.warning(
                "a save did not end within %.0f s because storage hangs; it is abandoned, and the "
                "process may exit",
                timeout_secs,
            )
        else:
            self._slots.close()
            self._copier.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                request, self._waiting = self._waiting, None
                skipped = list(self._skipped)
                self._skipped.clear()
                is_getting_ready, self._is_getting_ready = self._is_getting_ready, False
                self._changed.notify_all()
            for checkpoint in skipped:
                self._report_skipped(checkpoint)
            if request is not None:
                self._do(request)
                request = None
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

    def _do(self, request: SaveRequest) -> None:
        self._copying, self._next_copies = (), ()
        tier = None
        try:
            tier = self._save(request)
        except Exception as error:
            # This is the top of a thread: every error becomes the failure of the save, which the
            # training thread raises once.
            log.debug("save %s failed", request.plan.id, exc_info=True)
            is_lost = isinstance(error, AgentUnavailableError)
            self._fail(request, f"{type(error).__name__}: {error}", is_lost=is_lost)
        finally:
            self._end_copies(request, is_in_ram=tier == "ram")
            self._next_slot, self._pin = self._slot_after(request), request.snapshot.pin
            request.snapshot.release()
            self._set_at_storage(False)
        self.get_ready()

    def _slot_after(self, request: SaveRequest) -> protocol.WantSpare | None:
        """Return the slot that the next save needs if it is like this one; None without RAM."""
        if self._session.place.ram_folder is None:
            return None
        return self._wanted(
            self._parts.size_of_next_bytes(request.plan), request.plan.layout.size_bytes
        )

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
        """Prepare slots for the next image and its replicas, if the agent has free ones."""
        try:
            with self._patience.preparing():
                if not self._slots.is_ready(request.size_bytes):
                    slot = self._ask("spare", request, protocol.Slot)
                    if slot.name is not None:
                        self._slots.make_ready(slot.name, request.size_bytes, self._pin)
                if self._slots.has_ready:
                    self._copier.prepare(self._next_copies, self._spare_slot, self._pin)
        except HoldfastError as error:
            # Only logged: the next save requests a slot again and reports the error.
            log.debug("no slot is ready for the next image: %s", error)

    def _spare_slot(self, copy: PartCopy) -> str | None:
        size_bytes = copy.layout.size_bytes
        wanted = self._wanted(size_bytes, size_bytes, copy.rank)
        return self._ask("spare", wanted, protocol.Slot).name

    def _save(self, request: SaveRequest) -> str | None:
        """Write the part and report it; return its tier, or None if no tier takes it."""
        tier = self._fill(request)
        if tier is None:
            self._progress.finish(request.plan.id)
            return None
        now_secs, whole_bytes = self._clock.monotonic(), request.plan.layout.size_bytes
        written_bytes = whole_bytes if request.written_bytes is None else request.written_bytes
        message = protocol.Sealed(
            rank=request.plan.rank,
            id=(request.plan.id.step, request.plan.id.attempt),
            part_count=request.plan.part_count,
            tier=tier,
            durable=request.is_durable_due,
            blocked_secs=round((request.returned_secs or now_secs) - request.asked_secs, 6),
            secs=round(now_secs - request.asked_secs, 6),
            written_bytes=written_bytes,
            reused_bytes=max(0, whole_bytes - written_bytes),
        )
        self._progress.seal(request.plan.id, message)
        self._ask("sealed", message, protocol.Empty)
        self._progress.reported(request.plan.id)
        return tier

    def _begin_copies(self, request: SaveRequest, images: PartImages) -> tuple[int, ...]:
        """Return the ranks whose parts are about to be replicated; the agent is notified of them.

        No replicas are made if this rank's own part reuses images: the others' parts probably reuse
        images too, and their agents fetch only what changed.
        """
        request.written_bytes = images.own.size_bytes
        if not images.reused:
            self._copying = request.copies
            if request.filled is not None:
                self._copying = tuple(copied.copy for copied in request.copied)
            self._next_copies = request.copies
        return tuple(copy.rank for copy in self._copying)

    def _end_copies(self, request: SaveRequest, *, is_in_ram: bool) -> None:
        """Report which replicas were made, after making those that the training thread did not."""
        plan = request.plan
        made = {copied.copy.rank for copied in request.copied if copied.finish()}
        if not self._copying:
            return
        number = plan.id.step, plan.id.attempt

        def slot_for(copy: PartCopy) -> str | None:
            size_bytes = copy.layout.size_bytes
            message = protocol.WantSlot(
                rank=plan.rank, id=number, size_bytes=size_bytes, copy_of=copy.rank
            )
            return self._ask("slot", message, protocol.Slot).name

        for copy in self._copying if is_in_ram and request.filled is None else ():
            try:
                if self._copier.make(copy, request.snapshot, slot_for):
                    made.add(copy.rank)
            except HoldfastError as error:
                log.debug("no replica of rank %d's part is made: %s", copy.rank, error)
        copies = tuple(copy.rank for copy in self._copying)
        with contextlib.suppress(HoldfastError):
            report = protocol.Copied(rank=plan.rank, id=number, copies=copies, made=tuple(made))
            self._ask("copied", report, protocol.Empty)

    def _fill(self, request: SaveRequest) -> str | None:
        """Write the part to RAM, else to the durable tier; return the tier, None for neither."""
        filled = request.filled or self._filled_here(request)
        if filled is not None:
            with contextlib.closing(filled):
                tier = self._seal(request, filled)
            if filled.wait():
                return tier
            if request.interruption is not None:
                self._fail(request, request.interruption, is_lost=False)
                return None
        if request.snapshot.hold is not Hold.HOST and self._session.place.ram_folder is not None:
            return self._fill_from_devices(request)
        self._slots.release_ready()
        if self._session.place.ram_folder is None:
            slot = self._want_slot(request, None)
            return self._go_without_ram(request, None, slot.reason)
        with self._parts.draft(self._slots.store(), request.plan, request.snapshot) as draft:
            slot = self._want_slot(request, draft.images)
            reason = slot.reason
            if slot.name is not None:
                try:
                    self._parts.write(draft, self._slots.store(slot.name), request.snapshot)
                    return "ram"
                except StorageError as error:
                    reason = str(error)
        return self._go_without_ram(request, None, reason)

    def _filled_here(self, request: SaveRequest) -> FilledPart | None:
        """Fill a slot on this thread, if one was prepared after the training thread needed it."""
        filled = self._parts.begin(request.plan, request.snapshot)
        if filled is not None:
            filled.fill(request.snapshot)
        return filled

    def _fill_from_devices(self, request: SaveRequest) -> str | None:
        """Fill a slot by device copies and return the tier, None for neither.

        Without a slot, and after a failure of the RAM tier, the durable tier takes the part.
        """
        plan = request.plan
        with self._parts.draft(self._slots.store(), plan, request.snapshot) as draft:
            filling, reason = self._slot_for_devices(request, draft.images)
            if filling is None:
                return self._go_without_ram(request, None, reason)
            filled = FilledPart(draft, filling, self._clock)
            with contextlib.closing(filled):
                try:
                    keep = bool(self._copying)
                    self._parts.seal_from_devices(filled, request.snapshot, keep=keep)
                    return "ram"
                except StorageError as error:
                    draft.leave()
                    chunks = filled.chunk_bytes() if filled.wait() else None
                    return self._go_without_ram(request, chunks, str(error))

    def _slot_for_devices(
        self, request: SaveRequest, images: PartImages
    ) -> tuple[SlotWriter | None, str]:
        """Return the prepared slot or one that the agent assigns; else None and the reason."""
        size_bytes = images.own.size_bytes
        filling = self._slots.acquire(size_bytes)
        if filling is not None:
            with contextlib.ExitStack() as on_error:
                on_error.callback(filling.close)
                self._report_filling(request, images)
                on_error.pop_all()
            return filling, ""
        self._slots.release_ready()
        slot = self._want_slot(request, images)
        if slot.name is None:
            return None, slot.reason
        try:
            return self._slots.store(slot.name).begin(size_bytes), ""
        except StorageError as error:
            return None, str(error)

    def _report_filling(self, request: SaveRequest, images: PartImages) -> None:
        plan, copies = request.plan, self._begin_copies(request, images)
        number = plan.id.step, plan.id.attempt
        message = protocol.FillStarted(rank=plan.rank, id=number, copies=copies)
        self._ask("filling", message, protocol.Empty)

    def _seal(self, request: SaveRequest, filled: FilledPart) -> str | None:
        """Seal a part that is being copied; return the tier.

        None if no tier takes it, and if the state was not copied.
        """
        try:
            self._report_filling(request, filled.draft.images)
            return "ram" if self._parts.seal(filled, request.snapshot) else None
        except StorageError as error:
            filled.draft.leave()
            if not filled.wait():
                return None
            # The mapped slot stays readable even if its file was removed.
            return self._go_without_ram(request, filled.chunk_bytes(), str(error))
        finally:
            # The training thread may still be copying from the snapshot into the slot, which are
            # released next.
            filled.wait()

    def _go_without_ram(
        self, request: SaveRequest, filled: ChunkBytes | None, reason: str
    ) -> str | None:
        """Write the part to the durable tier, if it is due there; return the tier or None.

        Args:
            request: The save.
            filled: Reads the chunks from the slot, if the state is already released.
            reason: Why RAM does not take the part.
        """
        if self._session.place.ram_folder is not None:
            self._warn_no_ram(reason)
        if not request.is_durable_due:
            self._abandon(request.plan.id, reason)
            return None
        self._set_at_storage(True)
        if filled is not None:
            write_part(self._durable, request.plan, filled)
            return "durable"
        with self._parts.draft(self._durable, request.plan, request.snapshot) as draft:
            self._parts.write(draft, self._durable, request.snapshot)
        return "durable"

    def _want_slot(self, request: SaveRequest, images: PartImages | None) -> protocol.Slot:
        """Request a slot for the part's own image, waiting while the durable tier is behind.

        Args:
            request: The save.
            images: The part's images; None if there is no RAM tier.
        """
        plan = request.plan
        own = plan.layout if images is None else images.own
        message = protocol.WantSlot(
            rank=plan.rank,
            id=(plan.id.step, plan.id.attempt),
            size_bytes=own.size_bytes,
            copies=() if images is None else self._begin_copies(request, images),
        )
        slot = self._ask("slot", message, protocol.Slot)
        while slot.busy:
            if self._is_closed:
                raise StorageError(
                    "the manager was closed while the save waited for earlier ones to be written "
                    "to the durable tier, which may hang"
                )
            self._set_at_storage(True)
            # Each earlier checkpoint becomes durable or fails, and either frees a place. If storage
            # hangs, neither happens, and `close` ends the wait.
            self._clock.sleep(BUSY_SECS)
            slot = self._ask("slot", message, protocol.Slot)
        self._set_at_storage(False)
        return slot

    def _ask(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Call the agent, recording the start time from which `has_room` sees the duration."""
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

    def _warn_no_ram(self, reason: str) -> None:
        if self._has_warned_no_ram:
            return
        self._has_warned_no_ram = True
        log.warning("no RAM for checkpoints; writing them directly to the durable tier: %s", reason)
        self._session.report_event(RamUnavailable(rank=self._session.rank, reason=reason))

    def _report_skipped(self, checkpoint: CheckpointId) -> None:
        reason = f"rank {self._session.rank} {protocol.SKIPPED}"
        with contextlib.suppress(HoldfastError):
            self._abandon(checkpoint, reason, is_skipped=True)

    def _abandon(self, checkpoint: CheckpointId, reason: str, *, is_skipped: bool = False) -> None:
        number = checkpoint.step, checkpoint.attempt
        message = protocol.Abandoned(
            rank=self._session.rank, id=number, reason=reason, skipped=is_skipped
        )
        self._ask("abandoned", message, protocol.Empty)

    def _fail(self, request: SaveRequest, reason: str, *, is_lost: bool) -> None:
        self._progress.fail(request.plan.id, reason)
        if is_lost:
            # No agent can be notified; the next one detects the incomplete part by itself.
            return
        try:
            self._abandon(request.plan.id, reason)
        except HoldfastError as error:
            log.warning(
                "the failure of step %d could not be reported to the agent: %s",
                request.plan.id.step,
                error,
            )
