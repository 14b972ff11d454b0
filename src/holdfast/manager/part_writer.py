"""Write one rank's part to a tier: images reused from the last part, and an image of its own.

Invariants:
- Reused images are linked into the new checkpoint's folder before anything else of it is written,
  so their bytes stay even if the older checkpoint is dropped meanwhile.
- A part that is not sealed leaves no name behind, not even that of a reused image: the name alone
  would hold memory that is never freed.
- Only a sealed part is reused: whole images whose record was written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from holdfast.adapt.contract import Hold, Snapshot
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
    """A part being written to one store: its reused images are linked, and it is not sealed yet."""

    def __init__(self, store: Store, plan: PartPlan, images: PartImages) -> None:
        self.store = store
        self.plan = plan
        self.images = images
        self.is_sealed = False

    def leave(self) -> None:
        """Remove all its names from the store, unless it was sealed."""
        if not self.is_sealed:
            # An image without a record is not a part: nothing else would free its slot.
            with contextlib.suppress(StorageError):
                self.store.delete(image_key(self.plan.id, self.plan.rank, self.plan.part_count))
            unlink_reused(self.store, self.plan, self.images)


class FilledPart:
    """A draft whose own image is written to a slot.

    Its reused images are held open, so that they stay readable if their names are removed. One
    thread fills the slot; another thread may wait for that and seal the part.
    """

    def __init__(self, draft: PartDraft, filling: SlotWriter, clock: Clock) -> None:
        self.draft = draft
        self.filling = filling
        self._clock = clock
        self.progress = FillProgress()
        self._open = contextlib.ExitStack()
        self._readers: list[Reader] = []

    def open_reused(self) -> None:
        """Open the reused images.

        Raises:
            StorageError: One of them cannot be opened.
        """
        plan = self.draft.plan
        for image in self.draft.images.reused:
            key = reused_image_key(plan.id, plan.rank, plan.part_count, image.origin)
            self._readers.append(self._open.enter_context(self.draft.store.open(key)))

    def fill(self, snapshot: Snapshot) -> None:
        """Copy the changed chunks into the slot.

        After a failure, `wait` returns False, and a borrowed state has been copied to the host.
        """
        own = self.draft.images.own
        try:
            digests = fill_from(self.filling, own, snapshot, self._clock, digesting=True)
            self.progress.finish(digests)
        except (StorageError, DeviceError) as error:
            step = self.draft.plan.id.step
            log.warning("the slot for step %d cannot be filled: %s", step, error)
            if snapshot.hold is Hold.BORROWED:
                snapshot.secure()
        finally:
            self.end()

    def arriving(self, snapshot: Snapshot, *, keep: bool) -> DeviceCopy:
        """Return the copy by which devices fill the slot."""
        own = self.draft.images.own
        return DeviceCopy(self.filling, own, snapshot, self._clock, keep=keep)

    def end(self) -> None:
        """End the copying; threads in `wait` continue."""
        self.progress.end()

    def wait(self) -> bool:
        """Wait until the copying ends and return whether the slot holds the whole image."""
        return self.progress.wait()

    def chunk_bytes(self) -> ChunkBytes:
        """Return a reader of all chunks of the part, to write it to another tier.

        Raises:
            StorageError: The slot was changed by another process.
        """
        own, images, plan = self.filling.view(), self.draft.images, self.draft.plan
        places = {chunk.ordinal: (own, chunk.offset_bytes) for chunk in images.own.chunks}
        for reader, image in zip(self._readers, images.reused, strict=True):
            layout = partial_layout(plan.spec.arrays, plan.layout, members(image.laid))
            memory = reader.lasting_view()
            assert memory is not None
            used = set(members(image.used))
            places |= {
                c.ordinal: (memory, c.offset_bytes) for c in layout.chunks if c.ordinal in used
            }

        def found(chunk: Chunk) -> memoryview:
            view, offset_bytes = places[chunk.ordinal]
            return view[offset_bytes : offset_bytes + chunk.size_bytes]

        return found

    def close(self) -> None:
        """Release all memory, and remove the names of a part that was not sealed."""
        self.draft.leave()
        self._open.close()
        self.filling.close()


class PartWriter:
    """Write this rank's parts and track the last sealed one, whose images the next one reuses.

    Owned by the saver's thread; the training thread calls `begin` and `forget` too.
    """

    def __init__(self, slots: RamSlots, durable: Store, clock: Clock) -> None:
        self._slots = slots
        self._durable = durable
        self._clock = clock
        self._last: SealedPart | None = None

    def forget(self) -> None:
        """Reuse nothing for the next part, because the run continues from another checkpoint."""
        self._last = None

    def begin(
        self, plan: PartPlan, snapshot: Snapshot, held: contextlib.ExitStack | None = None
    ) -> FilledPart | None:
        """Begin a part in the prepared slot, if the changed chunks fit it.

        Args:
            plan: What to write.
            snapshot: The state.
            held: Closes the part too, with everything that was begun of it.

        Returns:
            The part, to be filled at once. None if no prepared slot fits, and if devices hold the
            state: the saver's thread waits for their copy.
        """
        if snapshot.hold is Hold.DEVICE or not self._slots.has_ready:
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
            log.debug("step %d reuses no images, they cannot be linked: %s", plan.id.step, error)
            filled.close()
            return None
        return filled

    def seal(self, filled: FilledPart, snapshot: Snapshot) -> bool:
        """Wait until the slot is filled and seal the part; return False if it was not filled.

        Raises:
            StorageError: The part is not sealed, and nothing of it is visible.
        """
        if not filled.filling.is_current:
            raise StorageError("the RAM tier was removed while the state was copied into it")
        if not filled.wait():
            return False
        self._seal(filled, snapshot, filled.progress.digests)
        return True

    def seal_from_devices(self, filled: FilledPart, snapshot: Snapshot, *, keep: bool) -> None:
        """Fill the slot by device copies, and seal the part as the bytes arrive.

        Args:
            filled: The part.
            snapshot: The state on the devices.
            keep: Do not release the snapshot afterwards.

        Raises:
            StorageError, DeviceError: The part is not sealed, and nothing of it is visible.
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
        """Seal the part of a slot that is filled, or that is filled while `wait_for` waits."""
        draft, filling = filled.draft, filled.filling
        if digests is None:
            digests = digests_of(filling, draft.images.own, wait_for)
        record = seal_slot(draft.store, filling, draft.plan, draft.images, digests)
        self._sealed(draft, record, snapshot)

    @contextlib.contextmanager
    def draft(self, store: Store, plan: PartPlan, snapshot: Snapshot) -> Iterator[PartDraft]:
        """Begin a part in `store`; if the block does not seal it, all its names are removed."""
        draft = PartDraft(store, plan, self._keep(store, plan, snapshot))
        try:
            yield draft
        finally:
            draft.leave()

    def write(self, draft: PartDraft, store: Store, snapshot: Snapshot) -> None:
        """Write and seal a draft.

        Args:
            draft: The part.
            store: The draft's store, with the slot for the image selected.
            snapshot: The state.

        Raises:
            StorageError: The part is not sealed, and nothing of it is visible.
        """
        record = write_part(store, draft.plan, snapshot.chunk_bytes, draft.images)
        self._sealed(draft, record, snapshot)

    def size_of_next_bytes(self, plan: PartPlan) -> int:
        """Return the expected size in bytes of the own image after that of `plan`."""
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
            log.debug("step %d reuses no images, they cannot be linked: %s", plan.id.step, error)
            return without_reuse(plan)
        return images

    def _choose(self, plan: PartPlan, snapshot: Snapshot, last: SealedPart | None) -> PartImages:
        # Chunks on a device are not compared by digest: that would need a copy to the host.
        chunk_bytes = None if snapshot.on_devices else snapshot.chunk_bytes
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
            is_readable=not snapshot.on_devices,
        )
