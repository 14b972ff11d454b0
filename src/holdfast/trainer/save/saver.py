"""Follow one save from the state on the training thread to the sealed and reported part.

The training thread at most copies the state, in `submit`; the saver's thread does the rest. Both
ways through this file are in the order in which they are taken, with their fallbacks in view.

Invariants:
- Each submitted save ends: as sealed, failed or abandoned.
- The resources of a request are released once: by the training thread until the request is handed
  over, by the saver's thread from then on.
- An exception on the training thread, at any point, ends the save in bounded time: as failed, or as
  complete if the saver's thread has everything it needs.

Assumes that `submit`, `expect`, `reuse_nothing` and `close` are called on the training thread only.

See docs/decisions/0046.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.adapt.contract import Hold, Pinning
from holdfast.clock import Clock
from holdfast.engine.saving.incremental import SealedPart, size_of_next_bytes
from holdfast.engine.saving.part import PartImages
from holdfast.engine.saving.part_writer import PartWriter, write_part
from holdfast.engine.saving.slots import RamSlots
from holdfast.errors import (
    AgentUnavailableError,
    DeviceError,
    HoldfastError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.host.wire.protocol import PartTier
from holdfast.observe.events.schema import RamUnavailable
from holdfast.store.contract import Store
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.planning import PartCopy
from holdfast.trainer.save.progress import Progress
from holdfast.trainer.save.replica_checks import BlockDigests, ReplicaChecks, digests_of
from holdfast.trainer.save.replica_writer import ReplicaWriter
from holdfast.trainer.save.save_queue import SaveQueue, SaveRequest
from holdfast.trainer.save.save_schedule import PREPARE_SECS, SlotPatience

BUSY_SECS = 0.02

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


class NextSlots(NamedTuple):
    """The slots that the next save needs: for this rank's image, and for replicas."""

    size_bytes: int
    whole_bytes: int
    copies: tuple[PartCopy, ...]
    pin: Pinning


class Saver:
    """The saver's thread, its queue, and the mapped slots, which the thread owns."""

    def __init__(
        self,
        session: AgentSession,
        durable: Store,
        progress: Progress,
        clock: Clock,
        checks: ReplicaChecks,
    ) -> None:
        self._session = session
        self._durable = durable
        self._progress = progress
        self._clock = clock
        self._checks = checks
        self._queue = SaveQueue(clock)
        self.has_room = self._queue.has_room
        self.get_ready = self._queue.get_ready
        self._warned_no_ram: set[bool] = set()
        """Which warning was logged: for saves that are due in the durable tier, or for others."""
        self._patience = SlotPatience(clock)
        self._slots = RamSlots(lambda: session.place.ram_folder, clock)
        self._last: SealedPart | None = None
        """The last sealed part, whose images the next one may reuse."""
        self._copier = ReplicaWriter(lambda: session.place.ram_folder, clock)
        self._next: NextSlots | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-save", daemon=True)
        self._thread.start()

    # On the training thread.

    def submit(self, request: SaveRequest) -> None:
        """Accept a save; wait while another one is already waiting.

        If a slot is prepared, the state is copied into it and the snapshot is released before this
        returns; a state that stays as it is until a later fence is copied by then. An exception
        that leaves this call ends the save; see the module.
        """
        self._revoked_on_error(request, self._take)
        request.returned_secs = self._clock.monotonic()

    def _take(self, request: SaveRequest) -> None:
        snapshot = request.snapshot
        self._progress.accept(
            request.plan.id, durable=request.is_durable_due, by_step=request.is_by_step
        )
        self._patience.note_taken()
        if snapshot.hold is not Hold.DEVICE:
            request.part = self._open_prepared(request, request.held)
        if request.part is None and snapshot.hold is Hold.BORROWED:
            snapshot.copy_borrowed()
        if request.part is not None and request.copies and not request.part.images.reused:
            request.replicas = self._copier.begin(request.copies, request.held)
        # The saver's thread reports the save to the agent while this thread copies.
        self._queue.put(request)
        finish = functools.partial(self._revoked_on_error, request, self._copy)
        if snapshot.hold is not Hold.BORROWED or not snapshot.at_fence(finish):
            self._copy(request)

    def _open_prepared(
        self, request: SaveRequest, held: contextlib.ExitStack | None = None
    ) -> PartWriter | None:
        """Open a part in the prepared slot, if the changed chunks fit it; None if they do not.

        Args:
            request: The save.
            held: Closes the part too, with everything that was begun of it.
        """
        tier = self._slots.prepared_in()
        if tier is None:
            return None
        part = PartWriter(tier, request.plan, request.snapshot, self._last)
        fill = self._slots.acquire(part.images.own, held)
        if fill is None:
            return None
        if held is not None:
            held.callback(part.close)
        if not part.open(fill):
            part.close()
            return None
        return part

    def _copy(self, request: SaveRequest) -> None:
        """Copy the state into the prepared slots, and release it if the part has it all."""
        if request.part is None:
            return
        is_whole = False
        try:
            is_whole = request.part.copy()
        except (StorageError, DeviceError) as error:
            log.warning("the slot for step %d cannot be filled: %s", request.plan.id.step, error)
        for replica in request.replicas:
            replica.copy(request.snapshot)
        if is_whole:
            self._digest_replicas(request)
            request.snapshot.release()

    def _digest_replicas(self, request: SaveRequest) -> None:
        """Digest this rank's copies of blocks that it compares, unless that was done."""
        with request.digesting:
            if request.compared is None or request.digests is not None:
                return
            try:
                request.digests = digests_of(request.snapshot, request.compared.blocks)
            except (StorageError, DeviceError) as error:
                log.debug("replicas of step %d: %s", request.plan.id.step, error)
                request.compared = None

    def _revoked_on_error(self, request: SaveRequest, act: Callable[[SaveRequest], None]) -> None:
        has_ended = False
        try:
            act(request)
            has_ended = True
        finally:
            if not has_ended:
                self._revoke(request, reason_of(sys.exc_info()[1]))

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
            self._queue.wake()
            return
        self._progress.fail_save(request.plan.id, reason)
        self.skip(request.plan.id)
        request.release_all()

    # On the saver's thread: one save, from the queue to the report.

    def _run(self) -> None:
        while True:
            work = self._queue.take()
            for checkpoint in work.skipped:
                self._report_skipped(checkpoint)
            if work.request is not None:
                self._do(work.request)
            elif work.is_closed:
                self._checks.compare()
                break
            elif work.is_getting_ready:
                if self._next is not None:
                    self._prepare(self._next)
                self._queue.note_ready()
            self._checks.compare()
            # The next call waits, and the request holds memory.
            del work
        self._queue.end()

    def _do(self, request: SaveRequest) -> None:
        # This is the top of a thread, which also runs code of the state's own classes: every error
        # of a save becomes its failure, which the training thread raises once.
        self._next, tier = None, None
        try:
            tier = self._save(request)
        except BaseException as error:
            log.debug("save %s failed", request.plan.id, exc_info=True)
            self._fail(request, error)
        try:
            self._end_copies(request, is_in_ram=tier is PartTier.RAM)
            self._next = self._slots_after(request)
        except BaseException as error:
            # The save has ended, and replicas and the next slot only make things faster.
            log.debug("after the save of step %d: %r", request.plan.id.step, error)
        finally:
            with request.digesting:
                # The training thread may not have come to it yet.
                request.compared = None
            request.snapshot.release()
            self._queue.hold_up(None)
        self.get_ready()

    def _save(self, request: SaveRequest) -> PartTier | None:
        """Write the part and report it; return its tier, or None if no tier takes it."""
        tier = self._write(request)
        if tier is None:
            return None
        now_secs, whole_bytes = self._clock.monotonic(), request.plan.layout.size_bytes
        written_bytes = whole_bytes if request.written_bytes is None else request.written_bytes
        message = protocol.Sealed(
            rank=request.plan.rank,
            id=request.plan.id,
            part_count=request.plan.part_count,
            tier=tier,
            durable=request.is_durable_due,
            blocked_secs=round((request.returned_secs or now_secs) - request.asked_secs, 6),
            secs=round(now_secs - request.asked_secs, 6),
            written_bytes=written_bytes,
            reused_bytes=max(0, whole_bytes - written_bytes),
        )
        self._digest_replicas(request)
        if request.compared is not None and request.digests is not None:
            plan, window = request.plan, request.compared
            self._checks.expect(BlockDigests(plan.id, plan.part_count, window, request.digests))
        self._progress.seal(request.plan.id, message)
        self._ask("sealed", message, protocol.Empty)
        self._progress.reported(request.plan.id)
        return tier

    def _write(self, request: SaveRequest) -> PartTier | None:
        """Write the part; return its tier, or None if no tier takes it.

        There are three ways; where one fails, the next is taken:
        1. The prepared slot, if the changed chunks fit it. The training thread fills it, or, for a
           state on devices, this thread.
        2. A slot that the agent assigns; while the durable tier is behind, this thread waits.
        3. The durable tier, if the save is due there: from the slot, if that has the whole image,
           else from the state.
        """
        if self._session.place.ram_folder is None:
            return self._write_durable(request, None, self._want_slot(request, None).reason)
        part = request.part or self._open_prepared(request)
        if part is not None:
            with contextlib.closing(part):
                try:
                    self._report_filling(request, part.images)
                    self._complete(request, part)
                    return PartTier.RAM
                except StorageError as error:
                    if part.is_whole:
                        return self._write_durable(request, part, error)
                    log.debug("step %d is not in the slot: %s", request.plan.id.step, error)
            if request.interruption is not None:
                raise StorageError(request.interruption)
        self._slots.release_ready()
        part = PartWriter(self._slots.store(), request.plan, request.snapshot, self._last)
        with contextlib.closing(part):
            part.open()
            slot = self._want_slot(request, part.images)
            if slot.name is None:
                return self._write_durable(request, part, slot.reason)
            try:
                part.fill_into(self._slots.begin(slot.name, part.images.own))
                self._complete(request, part)
            except StorageError as error:
                return self._write_durable(request, part, error)
            return PartTier.RAM

    def _complete(self, request: SaveRequest, part: PartWriter) -> None:
        """Write and seal the part, whose images the next save may reuse from then on."""
        self._last = part.complete(keep=bool(request.copying))
        request.written_bytes = part.images.own.size_bytes

    def _write_durable(
        self, request: SaveRequest, part: PartWriter | None, reason: str | StorageError
    ) -> PartTier | None:
        """Write the part to the durable tier, if it is due there; return the tier or None.

        Args:
            request: The save.
            part: What was begun of it in RAM, if anything.
            reason: Why RAM does not take it.
        """
        plan = request.plan
        if part is not None:
            part.discard()
        if self._session.place.ram_folder is not None:
            self._warn_no_ram(request, reason)
        if not request.is_durable_due:
            self._progress.drop(plan.id, str(reason))
            self._abandon(plan.id, str(reason))
            return None
        self._queue.hold_up(f"step {plan.id.step}, which is being written to the durable tier")
        if part is not None and part.is_whole:
            # The state may be released already.
            write_part(self._durable, plan, part.chunk_bytes())
            return PartTier.DURABLE
        direct = PartWriter(self._durable, plan, request.snapshot, self._last)
        with contextlib.closing(direct):
            direct.open()
            self._complete(request, direct)
        return PartTier.DURABLE

    def _report_filling(self, request: SaveRequest, images: PartImages) -> None:
        plan, copies = request.plan, self._begin_copies(request, images)
        message = protocol.FillStarted(rank=plan.rank, id=plan.id, copies=copies)
        self._ask("filling", message, protocol.Empty)

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
            id=plan.id,
            size_bytes=own.size_bytes,
            copies=() if images is None else self._begin_copies(request, images),
        )
        slot = self._ask("slot", message, protocol.Slot)
        while slot.busy:
            if self._queue.is_closed:
                raise StorageError(
                    "the manager was closed while the save waited for earlier ones to be written "
                    "to the durable tier, which may hang"
                )
            earlier = sorted(step for step in self._progress.steps() if step < plan.id.step)
            self._queue.hold_up(
                f"RAM for step {plan.id.step} ({slot.reason}); not ended before it: {earlier}"
            )
            # Each earlier checkpoint becomes durable or fails, and either frees a place. If storage
            # hangs, neither happens, and `close` ends the wait.
            self._clock.sleep(BUSY_SECS)
            slot = self._ask("slot", message, protocol.Slot)
        self._queue.hold_up(None)
        return slot

    def _begin_copies(self, request: SaveRequest, images: PartImages) -> tuple[int, ...]:
        """Return the ranks whose parts are about to be replicated; the agent is notified of them.

        No replicas are made if this rank's own part reuses images: the others' parts probably reuse
        images too, and their agents fetch only what changed.
        """
        request.is_reusing = bool(images.reused)
        if not request.is_reusing:
            request.copying = request.copies
            if request.part is not None:
                request.copying = tuple(replica.part for replica in request.replicas)
        return tuple(copy.rank for copy in request.copying)

    def _end_copies(self, request: SaveRequest, *, is_in_ram: bool) -> None:
        """Report which replicas were made, after making those that the training thread did not."""
        plan, snapshot = request.plan, request.snapshot
        ranks = {replica.part.rank for replica in request.replicas if replica.finish(snapshot)}
        if not request.copying:
            return

        def slot_for(copy: PartCopy) -> str | None:
            size_bytes = copy.layout.size_bytes
            message = protocol.WantSlot(
                rank=plan.rank, id=plan.id, size_bytes=size_bytes, copy_of=copy.rank
            )
            return self._ask("slot", message, protocol.Slot).name

        if is_in_ram and request.part is None:
            ranks.update(self._copier.make(request.copying, snapshot, slot_for))
        copies = tuple(copy.rank for copy in request.copying)
        with contextlib.suppress(HoldfastError):
            report = protocol.Copied(rank=plan.rank, id=plan.id, copies=copies, made=tuple(ranks))
            self._ask("copied", report, protocol.Empty)

    def _ask(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Call the agent, recording the start time from which `has_room` sees the duration."""
        with self._queue.asking():
            return self._session.call(name, message, kind)

    # Between saves.

    def reuse_nothing(self) -> None:
        """Reuse nothing for the next save, because the run continues from another checkpoint."""
        self._last = None

    def expect(self, size_bytes: int, copies: tuple[PartCopy, ...], pin: Pinning) -> None:
        """Prepare slots for the first save, before its state is known.

        Args:
            size_bytes: The size of this rank's image.
            copies: The replicas that this rank will make.
            pin: Registers the slots' memory.
        """
        self._next = NextSlots(size_bytes, size_bytes, copies, pin)
        self.get_ready()

    @property
    def is_expecting(self) -> bool:
        """Whether slots are prepared, or were, for a save that has not begun."""
        return self._next is not None

    def await_ready(self) -> None:
        """Wait for slots that are being prepared, for a bounded time, on the training thread."""
        self._queue.await_ready(PREPARE_SECS)

    def _slots_after(self, request: SaveRequest) -> NextSlots | None:
        """Return the slots that the next save needs if it is like this one; None without RAM."""
        if self._session.place.ram_folder is None:
            return None
        size_bytes = size_of_next_bytes(self._last, request.plan)
        whole_bytes = request.plan.layout.size_bytes
        copies = () if request.is_reusing else request.copies
        return NextSlots(size_bytes, whole_bytes, copies, request.snapshot.pin)

    def _prepare(self, slots: NextSlots) -> None:
        """Prepare slots for the next image and its replicas, if the agent has free ones."""
        try:
            with self._patience.preparing():
                if not self._slots.is_ready(slots.size_bytes):
                    name = self._spare_slot(slots.size_bytes, slots.whole_bytes)
                    if name is not None:
                        self._slots.make_ready(name, slots.size_bytes, slots.pin)
                if self._slots.has_ready:
                    self._copier.prepare(slots.copies, self._spare_copy, slots.pin)
        except (HoldfastError, MemoryError) as error:
            # Only logged: the next save requests a slot again and reports the error.
            log.debug("no slot is ready for the next image: %r", error)

    def _spare_copy(self, copy: PartCopy) -> str | None:
        return self._spare_slot(copy.layout.size_bytes, copy.layout.size_bytes, copy.rank)

    def _spare_slot(
        self, size_bytes: int, whole_bytes: int, copy_of: int | None = None
    ) -> str | None:
        message = protocol.WantSpare(
            group=self._session.group,
            rank=self._session.rank,
            size_bytes=size_bytes,
            whole_bytes=whole_bytes,
            copy_of=copy_of,
        )
        return self._ask("spare", message, protocol.Slot).name

    def should_wait(self, *, is_saving: bool) -> bool:
        """Return whether to defer a save that may wait for a later step.

        Called on the training thread. A save is deferred while a slot is being prepared, and while
        earlier saves are in progress whose end frees a slot; `SlotPatience` bounds both.

        Args:
            is_saving: Whether earlier saves are in progress.
        """
        if self._queue.is_getting_ready or self._patience.for_preparing():
            return True
        has_none = not self._slots.has_ready and self._session.place.ram_folder is not None
        return is_saving and has_none and self._patience.for_earlier_saves()

    def skip(self, checkpoint: CheckpointId) -> None:
        """Report that this rank skips a due checkpoint, so that other ranks do not wait for it."""
        if not self._session.is_alone:
            self._queue.skip(checkpoint)

    def close(self, timeout_secs: float) -> None:
        """End the thread after the saves it has, and release the slots.

        If the thread has not ended after `timeout_secs`, because storage hangs, it is abandoned
        with a warning; it ends with the process. A signal shortens the wait.
        """
        if self._queue.close(timeout_secs):
            self._slots.close()
            self._copier.close()

    # What is reported of a save that fails.

    def _warn_no_ram(self, request: SaveRequest, reason: str | StorageError) -> None:
        step, is_due = request.plan.id.step, request.is_durable_due
        if isinstance(reason, ObjectNotFoundError):
            # RAM has room: a file of this one part was removed while it was written.
            effect = "goes directly to the durable tier" if is_due else "is not made"
            log.warning("the save of step %d %s: %s", step, effect, reason)
            return
        if is_due not in self._warned_no_ram:
            effect = "writing them directly to the durable tier"
            if not is_due:
                effect = f"step {step} and later ones that are due in RAM alone are not saved"
            log.warning("no RAM for checkpoints; %s: %s", effect, reason)
        if not self._warned_no_ram:
            self._session.report_event(RamUnavailable(rank=self._session.rank, reason=str(reason)))
        self._warned_no_ram.add(is_due)

    def _report_skipped(self, checkpoint: CheckpointId) -> None:
        reason = f"rank {self._session.rank} {protocol.SKIPPED}"
        try:
            self._abandon(checkpoint, reason, is_skipped=True)
        except (HoldfastError, MemoryError) as error:
            # The agent drops the checkpoint after a while.
            log.debug("step %d is not reported as skipped: %r", checkpoint.step, error)

    def _abandon(self, checkpoint: CheckpointId, reason: str, *, is_skipped: bool = False) -> None:
        message = protocol.Abandoned(
            rank=self._session.rank, id=checkpoint, reason=reason, skipped=is_skipped
        )
        self._ask("abandoned", message, protocol.Empty)

    def _fail(self, request: SaveRequest, error: BaseException) -> None:
        reason = request.interruption or f"{type(error).__name__}: {error}"
        if isinstance(error, AgentUnavailableError):
            # No agent can be notified; the next one detects an incomplete part by itself.
            self._progress.fail_unconfirmed(request.plan.id, reason)
            return
        self._progress.fail_save(request.plan.id, reason)
        try:
            self._abandon(request.plan.id, reason)
        except (HoldfastError, MemoryError) as failure:
            log.warning(
                "the failure of step %d could not be reported to the agent: %s",
                request.plan.id.step,
                failure,
            )


def reason_of(error: BaseException | None) -> str:
    """Return the reason of a save that failed because of `error`."""
    detail = f": {error}" if error is not None and str(error) else ""
    return f"{type(error).__name__} was raised during the call of save{detail}"
