"""How one rank's part comes into a tier: what it reuses of the part before, and its own image.

Invariants:
- Reused images are linked into the new checkpoint's folder before anything else of it is written.
  So whatever is dropped meanwhile, their bytes stay.
- A part that is not sealed in the end leaves no name behind, also not that of a reused image: the
  name alone would hold memory that nobody gives back.
- Only what was sealed is reused: whole images under a record that was written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from holdfast.adapt.contract import Snapshot
from holdfast.clock import Clock
from holdfast.engine.saving.incremental import (
    SealedPart,
    choose,
    link_reused,
    remember,
    size_of_next_bytes,
    unlink_reused,
)
from holdfast.engine.saving.part import ChunkBytes, PartImages, PartPlan, without_reuse, write_part
from holdfast.engine.saving.slots import FillProgress, digests_of, seal_slot
from holdfast.errors import DeviceError, StorageError
from holdfast.format.layout import Chunk, partial_layout
from holdfast.format.names import image_key, reused_image_key
from holdfast.format.ranges import members
from holdfast.format.records import PartRecord
from holdfast.manager.device_copy import DeviceCopy, fill_from
from holdfast.manager.ram_slots import RamSlots
from holdfast.store.contract import Reader, Store
from holdfast.store.ram import SlotWriter

log = logging.getLogger(__name__)


class PartDraft:
    """A part under way in one store: its reused images are linked, and it is not sealed yet."""

    def __init__(self, store: Store, plan: PartPlan, images: PartImages) -> None:
        self.store = store
        self.plan = plan
        self.images = images
        self.is_sealed = False

    def leave(self) -> None:
        """Takes away what shows of it, unless it was sealed."""
        if not self.is_sealed:
            # An image whose record found no room is no part: nobody else would free its slot.
            with contextlib.suppress(StorageError):
                self.store.delete(image_key(self.plan.id, self.plan.rank, self.plan.part_count))
            unlink_reused(self.store, self.plan, self.images)


class FilledPart:
    """A draft whose own image goes into a slot; what it keeps is open, whoever takes its names.

    One thread fills it, another one may follow and seal it.
    """

    def __init__(self, draft: PartDraft, filling: SlotWriter, clock: Clock) -> None:
        self.draft = draft
        self.filling = filling
        self._clock = clock
        self.progress = FillProgress()
        self._open = contextlib.ExitStack()
        self._readers: list[Reader] = []

    def open_reused(self) -> None:
        """Opens what is reused.

        Raises:
            StorageError: it cannot be used.
        """
        plan = self.draft.plan
        for image in self.draft.images.reused:
            key = reused_image_key(plan.id, plan.rank, plan.part_count, image.origin)
            self._readers.append(self._open.enter_context(self.draft.store.open(key)))

    def fill(self, snapshot: Snapshot) -> None:
        """Copies the rest; what fails is told to whoever follows, and the state is on the host."""
        own = self.draft.images.own
        try:
            digests = fill_from(self.filling, own, snapshot, self._clock, digesting=True)
            self.progress.finish(digests)
        except (StorageError, DeviceError) as error:
            step = self.draft.plan.id.step
            log.warning("the slot for step %d cannot be filled: %s", step, error)
            if snapshot.is_borrowed:
                snapshot.bring_to_host()
        finally:
            self.end()

    def arriving(self, snapshot: Snapshot, *, keep: bool) -> DeviceCopy:
        """The slot, to be filled by devices."""
        own = self.draft.images.own
        return DeviceCopy(self.filling, own, snapshot, self._clock, keep=keep)

    def end(self) -> None:
        """No more is copied."""
        self.progress.end()

    def wait(self) -> bool:
        """Waits until the filling ends; whether it is whole."""
        return self.progress.wait()

    def chunk_bytes(self) -> ChunkBytes:
        """All chunks of the part, where they are to go elsewhere after all.

        Raises:
            StorageError: somebody changed the slot.
        """
        own, images, plan = self.filling.view(), self.draft.images, self.draft.plan
        places = {chunk.ordinal: (own, chunk.offset_bytes) for chunk in images.own.chunks}
        for reader, image in zip(self._readers, images.reused, strict=True):
            layout = partial_layout(plan.spec.arrays, plan.layout, members(image.laid))
            lent = reader.lasting_view()
            assert lent is not None
            used = set(members(image.used))
            places |= {
                c.ordinal: (lent, c.offset_bytes) for c in layout.chunks if c.ordinal in used
            }

        def found(chunk: Chunk) -> memoryview:
            view, offset_bytes = places[chunk.ordinal]
            return view[offset_bytes : offset_bytes + chunk.size_bytes]

        return found

    def close(self) -> None:
        """Lets go of all memory; a part that was not sealed leaves nothing behind."""
        self.draft.leave()
        self._open.close()
        self.filling.close()


class PartWriter:
    """Owned by the saver's thread; `begin` and `forget` are also the training thread's."""

    def __init__(self, slots: RamSlots, durable: Store, clock: Clock) -> None:
        self._slots = slots
        self._durable = durable
        self._clock = clock
        self._last: SealedPart | None = None

    def forget(self) -> None:
        """The next part keeps nothing: the run goes on from elsewhere."""
        self._last = None

    def begin(
        self, plan: PartPlan, snapshot: Snapshot, held: contextlib.ExitStack | None = None
    ) -> FilledPart | None:
        """Return a part to be filled at once into the slot that is ready, if what changed fits it.

        `held` closes it too, with all that was begun of it. None also where devices keep the
        state: their copy is waited for on the saver's thread.
        """
        if not (snapshot.is_on_host or snapshot.is_borrowed) or not self._slots.has_ready:
            return None
        last = self._last_in("ram")
        images = self._choose(plan, snapshot, last)
        filling = self._slots.acquire(images.own.size_bytes, held)
        if filling is None:
            return None
        filled = FilledPart(PartDraft(self._slots.tier(), plan, images), filling, self._clock)
        if held is not None:
            held.callback(filled.close)
        try:
            if last is not None:
                link_reused(filled.draft.store, plan, images, last)
            filled.open_reused()
        except StorageError as error:
            log.debug("step %d is saved whole, nothing can be reused: %s", plan.id.step, error)
            filled.close()
            return None
        return filled

    def seal(self, filled: FilledPart, snapshot: Snapshot) -> bool:
        """Makes a part of what is being filled; False: it was not filled.

        Raises:
            StorageError: nothing of it is visible as a part.
        """
        if not filled.filling.is_current:
            raise StorageError("the RAM tier was removed while the state was copied into it")
        if not filled.wait():
            return False
        self._seal(filled, snapshot, filled.progress.digests)
        return True

    def seal_from_devices(self, filled: FilledPart, snapshot: Snapshot, *, keep: bool) -> None:
        """Has devices fill a slot, and makes a part of it while they do.

        Raises:
            StorageError, DeviceError: nothing of it is visible as a part.
        """
        arriving = filled.arriving(snapshot, keep=keep)
        try:
            filled.open_reused()
            with arriving:
                self._seal(filled, snapshot, None, arriving.wait)
        finally:
            if arriving.is_whole:
                filled.progress.finish()
            filled.end()

    def _seal(
        self,
        filled: FilledPart,
        snapshot: Snapshot,
        digests: Sequence[str] | None,
        wait_for: Callable[[int], None] = lambda stop_bytes: None,
    ) -> None:
        """Makes a part of a slot that is filled, or is while one waits."""
        draft, filling = filled.draft, filled.filling
        if digests is None:
            digests = digests_of(filling, draft.images.own, wait_for)
        record = seal_slot(draft.store, filling, draft.plan, draft.images, digests)
        self._sealed(draft, record, snapshot)

    @contextlib.contextmanager
    def draft(self, store: Store, plan: PartPlan, snapshot: Snapshot) -> Iterator[PartDraft]:
        """A part to be written to `store`; without being sealed it leaves nothing behind."""
        draft = PartDraft(store, plan, self._keep(store, plan, snapshot))
        try:
            yield draft
        finally:
            draft.leave()

    def write(self, draft: PartDraft, store: Store, snapshot: Snapshot) -> None:
        """Writes a draft; `store` is the draft's, as it takes an image.

        Raises:
            StorageError: nothing of it is visible as a part.
        """
        record = write_part(store, draft.plan, snapshot.chunk_bytes, draft.images)
        self._sealed(draft, record, snapshot)

    def size_of_next_bytes(self, plan: PartPlan) -> int:
        """How large the own image after that of `plan` will probably be."""
        last = self._last_in("ram")
        if last is None or last.record.id != plan.id:
            return plan.layout.size_bytes
        return size_of_next_bytes(last, plan)

    def _last_in(self, tier: str) -> SealedPart | None:
        last = self._last
        return last if last is not None and last.tier == tier else None

    def _keep(self, store: Store, plan: PartPlan, snapshot: Snapshot) -> PartImages:
        last = self._last_in(store.tier)
        images = self._choose(plan, snapshot, last)
        if last is None or not images.reused:
            return images
        try:
            link_reused(store, plan, images, last)
        except StorageError as error:
            log.debug("step %d is saved whole, nothing can be reused: %s", plan.id.step, error)
            return without_reuse(plan)
        return images

    def _choose(self, plan: PartPlan, snapshot: Snapshot, last: SealedPart | None) -> PartImages:
        # What is on a device would have to come to the host to be digested.
        chunk_bytes = snapshot.chunk_bytes if snapshot.is_on_host else None
        return choose(plan, last, snapshot.marks, chunk_bytes)

    def _sealed(self, draft: PartDraft, record: PartRecord, snapshot: Snapshot) -> None:
        draft.is_sealed = True
        self._last = remember(
            draft.store.tier,
            record,
            draft.plan,
            draft.images,
            snapshot.marks,
            self._last,
            is_readable=snapshot.is_on_host,
        )
