"""Hold this host's RAM tier: its store and its slots. A failure of the tier is reported once.

Any thread may call the tier. The replicas and the count of pulled bytes are the event loop's.
"""

from __future__ import annotations

from holdfast.coordination.inputs import Listed
from holdfast.engine.lifecycle.catalog import Listing, list_checkpoints, list_folder
from holdfast.engine.lifecycle.commit import remove
from holdfast.errors import StorageError
from holdfast.format.names import CheckpointId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.tiers.local_replicas import LocalReplicas
from holdfast.host.tiers.slot_allocator import SlotAllocator
from holdfast.host.wire.agent_directory import ram_folder
from holdfast.observe.events.schema import RamUnavailable
from holdfast.observe.events.writer import EventWriter
from holdfast.store.ram import RamStore
from holdfast.store.slots import SlotPool


class RamTier:
    """The RAM tier of one host.

    Attributes:
        slots: the allocation of the pool's slots.
        replicas: the replicas of other hosts' parts that trainers here make.
        pulled_bytes: the bytes read from other hosts' images for replicas on this host, since the
            agent started.
    """

    def __init__(self, store: RamStore, pool: SlotPool, events: EventWriter) -> None:
        self.store = store
        self.pool = pool
        self.slots = SlotAllocator(pool)
        self.replicas = LocalReplicas()
        self.pulled_bytes = 0
        self._events = events
        self._has_reported = False

    def checkpoints(self) -> dict[CheckpointId, Listed]:
        """Return the checkpoints here, with the ranks whose part is whole.

        The result is empty if RAM fails, which is reported once.
        """
        try:
            return listed_parts(list_checkpoints(self.store))
        except StorageError as error:
            self.report(error)
            return {}

    def free_checkpoint(self, checkpoint: CheckpointId) -> None:
        """Free a checkpoint's RAM; a failure is reported once, and leaves the RAM in use."""
        try:
            remove(self.store, checkpoint, list_folder(self.store, checkpoint))
        except StorageError as error:
            self.report(error)

    def free_surplus(self) -> None:
        """Free the slots that no save needs; a failure is reported once."""
        try:
            self.slots.free_surplus()
            self.store.release_idle()
        except StorageError as error:
            self.report(error)

    def report(self, error: StorageError) -> None:
        """Report once that an operation on the tier fails."""
        if not self._has_reported:
            self._has_reported = True
            self._events.write(RamUnavailable(reason=str(error)))


def open_ram(run: AgentRun) -> RamTier:
    """Open the RAM tier in the agent's folder.

    Raises:
        OSError: the folder has no room for it.
    """
    root = ram_folder(run.folder)
    root.mkdir(mode=0o700, exist_ok=True)
    pool = SlotPool(root, None, run.clock, run.files)
    store = RamStore(root, pool.reserve, run.clock, run.files)
    pool.on_evicted = store.release_deleted
    return RamTier(store, pool, run.events)


def listed_parts(listings: dict[CheckpointId, Listing]) -> dict[CheckpointId, Listed]:
    """Return the listings whose parts belong to one plan; others are no checkpoints."""
    listed = {}
    for checkpoint, listing in listings.items():
        counts = set(listing.parts.values())
        if len(counts) == 1:
            listed[checkpoint] = Listed(part_count=counts.pop(), ranks=frozenset(listing.parts))
    return listed
