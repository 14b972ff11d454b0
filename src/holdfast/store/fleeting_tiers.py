"""The leases of a run with two durable tiers, as one `FleetingStore`: written to both.

A start that shares one of the tiers with a live attempt finds its lease there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from holdfast.store.contract import StoredObject
from holdfast.store.durable import FleetingStore, TimedObject


class FleetingTiers:
    """The objects of the stores that `tiers` returns at each call; the durable tier comes first.

    An error of the remote tier is raised after the durable one was changed.
    """

    def __init__(self, tiers: Callable[[], Sequence[FleetingStore]]) -> None:
        self._tiers = tiers

    def put(self, key: str, data: bytes) -> None:
        for store in self._tiers():
            store.put(key, data)

    def read_timed(self, key: str) -> TimedObject | None:
        """Return the object that was written last, by its age; each tier has a clock of its own."""
        found = [read for store in self._tiers() if (read := store.read_timed(key)) is not None]
        return min(found, key=lambda read: read.now_ns - read.written_ns, default=None)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield each object once."""
        found = {stored.key: stored for store in self._tiers() for stored in store.list(prefix)}
        return iter([found[key] for key in sorted(found)])

    def delete(self, *keys: str) -> None:
        for store in self._tiers():
            store.delete(*keys)
