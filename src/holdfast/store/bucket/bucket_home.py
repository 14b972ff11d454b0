"""The home of a run in a bucket, and its objects that need not last.

A bucket does not move, and is not unmounted. So the home is its URL; this host's files of the run
are in a folder of this host (`store.location`). No request shows by itself that the run was deleted
there: a caller that finds it notes it here, and nothing is written there any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from holdfast.clock import Clock
from holdfast.errors import ObjectNotFoundError, StorageError
from holdfast.format.names import LEASES
from holdfast.format.records import RunPlace
from holdfast.store.contract import Store, StoredObject
from holdfast.store.durable import TimedObject

NO_INODE = 0


class BucketHome:
    """A URL, and the folder of this host's files of the run there."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._gone_reason: str | None = None
        """Set once, by any thread."""

    def __repr__(self) -> str:
        return self._url

    @property
    def location_text(self) -> str:
        """The URL."""
        return self._url

    @property
    def identity_text(self) -> str:
        """The URL: two URLs of one place count as two places."""
        return self._url

    def current_folder(self) -> Path:
        if self._gone_reason is not None:
            raise StorageError(self._gone_reason)
        return self._folder

    def recorded_place(self) -> RunPlace:
        return RunPlace(inode=NO_INODE, path=self._url)

    def has_lasting_inodes(self) -> bool:
        return False

    def unusable_reason(self) -> str | None:
        """Return that the run was deleted; the store's own requests report anything else."""
        return self._gone_reason

    def is_gone(self) -> bool:
        return self._gone_reason is not None

    def note_gone(self, reason: str) -> None:
        self._gone_reason = reason

    def is_at(self, text: str) -> bool:
        return text == self._url

    def release(self) -> None:
        """Do nothing: nothing is held."""


class DatedStore(Store, Protocol):
    """A store whose service dates its objects."""

    def modified_ns(self, key: str) -> int:
        """Return when an object was written, by the service's clock.

        Raises:
            ObjectNotFoundError: There is none.
        """
        ...


@contextlib.contextmanager
def removed_after(store: Store, key: str) -> Iterator[None]:
    """Remove an object after the block, whose own error is not hidden by that of the removal."""
    hidden: tuple[type[StorageError], ...] = (StorageError,)
    try:
        yield
        hidden = ()
    finally:
        with contextlib.suppress(*hidden):
            store.delete(key)


class FleetingObjects:
    """A `FleetingStore` in a bucket, with times by the service's clock, in whole seconds."""

    def __init__(self, store: DatedStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def read_timed(self, key: str) -> TimedObject | None:
        try:
            data, written_ns = self._store.get(key), self._store.modified_ns(key)
        except ObjectNotFoundError:
            return None
        # No request returns the service's time. An object written now has it.
        probe = f"{LEASES}/now-{self._clock.new_token()}.json"
        with removed_after(self._store, probe):
            self._store.put(probe, b"")
            now_ns = self._store.modified_ns(probe)
        # Race: a lease that was renewed between the two requests counts as younger than it is read.
        return TimedObject(data, written_ns, max(now_ns, written_ns))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._store.list(prefix)

    def delete(self, *keys: str) -> None:
        self._store.delete(*keys)
