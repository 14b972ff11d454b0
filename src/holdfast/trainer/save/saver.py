"""Write parts on a background thread; the training thread at most copies the state, in `submit`.

Invariants:
- At most one save waits while another one is written, so `submit` may wait for RAM. `has_room`
  reports beforehand if it would wait for storage or for an agent that does not answer.
- Each submitted save ends: as sealed, failed or abandoned.
- The resources of a request are released once: by the training thread until the request is handed
  over, by the saver's thread from then on.
- An exception on the training thread, at any point, ends the save in bounded time: as failed, or as
  complete if the saver's thread has everything it needs.

Assumes that `submit`, `expect`, `reuse_nothing` and `close` are called on the training thread only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from holdfast import waits
from holdfast.adapt.contract import Hold, Pinning, Snapshot
from holdfast.clock import Clock
from holdfast.conditions import Condition
from holdfast.engine.saving.incremental import LastPart
from holdfast.engine.saving.part import PartImages, PartPlan
from holdfast.engine.saving.part_writer import PartWriter, write_part
from holdfast.engine.saving.slots import RamSlots, SlotFill
from holdfast.errors import (
    AgentUnavailableError,
    DeviceError,
    FencedError,
    HoldfastError,
    ObjectNotFoundError,
    StorageError,
    WaitInterruptedError,
)
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.observe.events.schema import RamUnavailable
from holdfast.store.contract import Store
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.planning import PartCopy
from holdfast.trainer.save.progress import Progress
from holdfast.trainer.save.replica_writer import LocalReplica, ReplicaWriter
from holdfast.trainer.save.save_schedule import SlotPatience

BUSY_SECS = 0.02
SKIPPED_MAX = 64
PATIENCE_SECS = 2.0
"""How long the training thread waits for an agent's answer before it skips the save."""
WARN_SECS = 5.0
"""How long the training thread waits for an earlier save before it warns."""

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(slots=True, kw_only=True)
class SaveRequest:
    """One save: the plan, the tiers, and the state, which is fixed or being copied into slots.

    Attributes:
        plan: What to write.
        snapshot: The state.
        is_durable_due: Whether the save is for the durable tier.
        is_by_step: Whether the save is for exactly this step.
        copies: The parts of other ranks that can be replicated from the same state.
        part: The part in the prepared slot, which the training thread fills; None without one.
        replicas: Those of `copies` that the training thread makes.
        held: Closes the request's resources, until it is handed over.
        is_handed_over: Whether the saver's thread owns the request. Written by the training thread.
        asked_secs: The monotonic time at which `save` was called.
        returned_secs: When the training thread continued; None: it has not yet. Written by it.
        written_bytes: The size of the image to write; None until it is known.
        interruption: Why the training thread left the save before its end. Written before the
            copying ends, so the saver's thread sees it after it has waited for that.
    """

    plan: PartPlan
    snapshot: Snapshot
    is_durable_due: bool
    is_by_step: bool
    copies: tuple[PartCopy, ...] = ()
    part: PartWriter | None = None
    replicas: tuple[LocalReplica, ...] = ()
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    is_handed_over: bool = False
    asked_secs: float
    returned_secs: float | None = None
    written_bytes: int | None = None
    interruption: str | None = None

    def copy(self) -> None:
        """Copy the state into the prepared slots, and release it if the part has it all."""
        if self.part is None:
            return
        is_whole = False
        try:
            is_whole = self.part.write()
        except (StorageError, DeviceError) as error:
            log.warning("the slot for step %d cannot be filled: %s", self.plan.id.step, error)
        for replica in self.replicas:
            replica.copy(self.snapshot)
        if is_whole:
            self.snapshot.release()

    def end(self) -> None:
        """End the copying; threads that wait for it continue."""
        if self.part is not None:
            self.part.end()
        for replica in self.replicas:
            replica.fill.end()

    def release_all(self) -> None:
        """Release all resources of a request that was not handed over."""
        self.end()
        self.held.close()
        self.snapshot.release()


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
        self._at_storage: str | None = None
        self._asked_at: float | None = None
        self._is_closed = False
        self._has_ended = False
        self._is_getting_ready = False
        self._warned_no_ram: set[bool] = set()
        """Which warning was logged: for saves that are due in the durable tier, or for others."""
        self._patience = SlotPatience(clock)
        self._slots = RamSlots(lambda: session.place.ram_folder, clock)
        self._last = LastPart()
        self._copier = ReplicaWriter(lambda: session.place.ram_folder, clock)
        self._copying: tuple[PartCopy, ...] = ()
        self._next_slot: protocol.WantSpare | None = None
        self._next_copies: tuple[PartCopy, ...] = ()
        self._pin: Pinning = lambda memory: None
        self._thread = threading.Thread(target=self._run, name="holdfast-save", daemon=True)
        self._thread.start()

    def submit(self, request: SaveRequest) -> None:
        """Accept a save; wait while another one is already waiting.

        Called on the training thread. If a slot is prepared, the state is copied into it and the
        snapshot is released before this returns; a state that stays as it is until a later fence is
        copied by then. An exception that leaves this call ends the save; see the module.
        """
        self._revoked_on_error(request, self._take)
        request.returned_secs = self._clock.monotonic()

    def _revoked_on_error(self, request: SaveRequest, act: Callable[[SaveRequest], None]) -> None:
        has_ended = False
        try:
            act(request)
            has_ended = True
        finally:
            if not has_ended:
                self._revoke(request, reason_of(sys.exc_info()[1]))

    def _take(self, request: SaveRequest) -> None:
        snapshot = request.snapshot
        self._progress.accept(
            request.plan.id, durable=request.is_durable_due, by_step=request.is_by_step
        )
        self._patience.note_taken()
        if snapshot.hold is not Hold.DEVICE:
            request.part = self._begin(request, request.held)
        if request.part is None and snapshot.hold is Hold.BORROWED:
            snapshot.copy_borrowed()
        if request.part is not None and request.copies and not request.part.images.reused:
            request.replicas = self._copier.begin(request.copies, request.held)
        # The saver's thread reports the save to the agent while this thread copies.
        self._submit(request)
        finish = functools.partial(self._revoked_on_error, request, SaveRequest.copy)
        if snapshot.hold is not Hold.BORROWED or not snapshot.at_fence(finish):
            request.copy()

    def _begin(
        self, request: SaveRequest, held: contextlib.ExitStack | None = None
    ) -> PartWriter | None:
        """Begin a part in the prepared slot, if the changed chunks fit it; None if they do not.

        Args:
            request: The save.
            held: Closes the part too, with everything that was begun of it.
        """
        if not self._slots.has_ready:
            return None
        part = PartWriter(self._slots.tier(), request.plan, request.snapshot, self._last)
        layout = part.images.own
        slot = self._slots.acquire(layout.size_bytes, held)
        if slot is None:
            return None
        if held is not None:
            held.callback(part.close)
        if not part.open(SlotFill(slot, layout, self._clock)):
            part.close()
            return None
        return part

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
        self._progress.fail_save(request.plan.id, reason)
        self.skip(request.plan.id)
        request.release_all()

    def reuse_nothing(self) -> None:
        """Reuse nothing for the next save, because the run continues from another checkpoint."""
        self._last.reuse_nothing()

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
            if not waits.wait_for(self._changed, self._has_place, WARN_SECS):
                asked = "an answer of the host's agent" if self._asked_at else "an earlier save"
                log.warning(
                    "save step %d: the training has waited for %.0f s, and goes on waiting, for "
                    "%s; `holdfast status` shows whether the agents of all hosts answer",
                    request.plan.id.step,
                    WARN_SECS,
                    self._at_storage or asked,
                )
                waits.wait_for(self._changed, self._has_place, None)
            request.is_handed_over, self._waiting = True, request
            self._changed.notify_all()

    def _has_place(self) -> bool:
        return self._waiting is None or self._is_closed

    def has_room(self) -> bool:
        """Return whether one more save can be submitted without waiting for storage.

        The call waits while an earlier save is copied into RAM, which is short and bounded, and
        until a signal arrives: the save that is then skipped is followed by that of the preemption.
        """
        with self._changed:
            while self._waiting is not None and not self._is_held_up() and not waits.has_signal():
                self._changed.wait(waits.slice_secs(PATIENCE_SECS))
            return self._waiting is None

    def _is_held_up(self) -> bool:
        if self._asked_at is None or self._at_storage is not None:
            return self._at_storage is not None
        return self._clock.monotonic() - self._asked_at >= PATIENCE_SECS

    def close(self, timeout_secs: float) -> None:
        """End the thread after the saves it has, and release the slots.

        If the thread has not ended after `timeout_secs`, because storage hangs, it is abandoned
        with a warning; it ends with the process. A signal shortens the wait.
        """
        began_secs = self._clock.monotonic()
        with (
            contextlib.suppress(WaitInterruptedError),
            waits.ended_by_signals("close", lambda: "a save has not ended"),
            self._changed,
        ):
            self._is_closed = True
            self._changed.notify_all()
            # Not `Thread.join`: a Ctrl-C during it marks a running thread as ended.
            waits.wait_for(self._changed, lambda: self._has_ended, timeout_secs)
        if not self._has_ended:
            log.warning(
                "a save did not end within %.0f s because storage hangs; it is abandoned, and the "
                "process may exit",
                self._clock.monotonic() - began_secs,
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
        # This is the top of a thread, which also runs code of the state's own classes: every error
        # of a save becomes its failure, which the training thread raises once.
        self._copying, self._next_copies, self._next_slot = (), (), None
        tier = None
        try:
            tier = self._save(request)
        except BaseException as error:
            log.debug("save %s failed", request.plan.id, exc_info=True)
            self._fail(request, error)
        try:
            self._end_copies(request, is_in_ram=tier == "ram")
            self._next_slot, self._pin = self._slot_after(request), request.snapshot.pin
        except BaseException as error:
            # The save has ended, and replicas and the next slot only make things faster.
            log.debug("after the save of step %d: %r", request.plan.id.step, error)
        finally:
            request.snapshot.release()
            self._set_at_storage(None)
        self.get_ready()

    def _save(self, request: SaveRequest) -> str | None:
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
        self._progress.seal(request.plan.id, message)
        self._ask("sealed", message, protocol.Empty)
        self._progress.reported(request.plan.id)
        return tier

    def _slot_after(self, request: SaveRequest) -> protocol.WantSpare | None:
        """Return the slot that the next save needs if it is like this one; None without RAM."""
        if self._session.place.ram_folder is None:
            return None
        return self._wanted(
            self._last.size_of_next_bytes(request.plan), request.plan.layout.size_bytes
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
        except (HoldfastError, MemoryError) as error:
            # Only logged: the next save requests a slot again and reports the error.
            log.debug("no slot is ready for the next image: %r", error)

    def _spare_slot(self, copy: PartCopy) -> str | None:
        size_bytes = copy.layout.size_bytes
        wanted = self._wanted(size_bytes, size_bytes, copy.rank)
        return self._ask("spare", wanted, protocol.Slot).name

    def _begin_copies(self, request: SaveRequest, images: PartImages) -> tuple[int, ...]:
        """Return the ranks whose parts are about to be replicated; the agent is notified of them.

        No replicas are made if this rank's own part reuses images: the others' parts probably reuse
        images too, and their agents fetch only what changed.
        """
        request.written_bytes = images.own.size_bytes
        if not images.reused:
            self._copying = request.copies
            if request.part is not None:
                self._copying = tuple(replica.part for replica in request.replicas)
            self._next_copies = request.copies
        return tuple(copy.rank for copy in self._copying)

    def _end_copies(self, request: SaveRequest, *, is_in_ram: bool) -> None:
        """Report which replicas were made, after making those that the training thread did not."""
        plan = request.plan
        made = {one.part.rank for one in request.replicas if one.finish(request.snapshot)}
        if not self._copying:
            return

        def slot_for(copy: PartCopy) -> str | None:
            size_bytes = copy.layout.size_bytes
            message = protocol.WantSlot(
                rank=plan.rank, id=plan.id, size_bytes=size_bytes, copy_of=copy.rank
            )
            return self._ask("slot", message, protocol.Slot).name

        for copy in self._copying if is_in_ram and request.part is None else ():
            try:
                if self._copier.make(copy, request.snapshot, slot_for):
                    made.add(copy.rank)
            except HoldfastError as error:
                log.debug("no replica of rank %d's part is made: %s", copy.rank, error)
        copies = tuple(copy.rank for copy in self._copying)
        with contextlib.suppress(HoldfastError):
            report = protocol.Copied(rank=plan.rank, id=plan.id, copies=copies, made=tuple(made))
            self._ask("copied", report, protocol.Empty)

    def _write(self, request: SaveRequest) -> str | None:
        """Write the part to RAM, else to the durable tier; return the tier, None for neither."""
        if self._session.place.ram_folder is None:
            slot = self._want_slot(request, None)
            return self._write_durable(request, None, slot.reason)
        part = request.part or self._begin(request)
        if part is not None:
            with contextlib.closing(part):
                try:
                    self._report_filling(request, part.images)
                    if part.write(keep=bool(self._copying)):
                        part.seal()
                        return "ram"
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
                layout = part.images.own
                filled = self._slots.begin(slot.name, layout.size_bytes)
                part.fill_into(SlotFill(filled, layout, self._clock))
                part.write(keep=bool(self._copying))
                part.seal()
            except StorageError as error:
                return self._write_durable(request, part, error)
            return "ram"

    def _report_filling(self, request: SaveRequest, images: PartImages) -> None:
        plan, copies = request.plan, self._begin_copies(request, images)
        message = protocol.FillStarted(rank=plan.rank, id=plan.id, copies=copies)
        self._ask("filling", message, protocol.Empty)

    def _write_durable(
        self, request: SaveRequest, part: PartWriter | None, reason: str | StorageError
    ) -> str | None:
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
        self._set_at_storage(f"step {plan.id.step}, which is being written to the durable tier")
        if part is not None and part.is_whole:
            # The state may be released already.
            write_part(self._durable, plan, part.chunk_bytes())
            return "durable"
        with contextlib.closing(
            PartWriter(self._durable, plan, request.snapshot, self._last)
        ) as direct:
            direct.open()
            direct.write()
            direct.seal()
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
            id=plan.id,
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
            earlier = sorted(step for step in self._progress.steps() if step < plan.id.step)
            self._set_at_storage(
                f"RAM for step {plan.id.step} ({slot.reason}); not ended before it: {earlier}"
            )
            # Each earlier checkpoint becomes durable or fails, and either frees a place. If storage
            # hangs, neither happens, and `close` ends the wait.
            self._clock.sleep(BUSY_SECS)
            slot = self._ask("slot", message, protocol.Slot)
        self._set_at_storage(None)
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

    def _set_at_storage(self, waits_for: str | None) -> None:
        with self._changed:
            self._at_storage = waits_for
            self._changed.notify_all()

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


def report_all(session: AgentSession, progress: Progress) -> None:
    """Report each sealed part whose save has not ended to a new agent.

    The agent answers with the end of the save, or accepts the part if RAM still holds it. If it
    does neither, the save has failed.
    """
    for sealed in progress.sealed_again():
        if _report_again(session, sealed):
            progress.reported(sealed.id)


def report_unknown(session: AgentSession, progress: Progress, checkpoint: CheckpointId) -> None:
    """Report a part that is unknown to the agent, if its save has not ended meanwhile."""
    sealed = progress.sealed_part(checkpoint)
    if sealed is None:
        # It was for RAM alone, and an earlier agent recycled it: a newer checkpoint exists.
        progress.finish(checkpoint)
    elif not _report_again(session, sealed):
        progress.fail_save(checkpoint, "it is unknown to the agent, and a newer attempt has begun")


def _report_again(session: AgentSession, sealed: protocol.Sealed) -> bool:
    """Report one part again and return whether it belongs to the run's current attempt."""
    try:
        session.call("sealed", msgspec.structs.replace(sealed, again=True), protocol.Empty)
    except FencedError:
        return False
    return True
