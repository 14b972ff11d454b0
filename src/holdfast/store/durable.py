"""The contract of a run's durable tier, wherever the run lies.

`DurableStore` is a store, the run's home, and the objects that need not last (leases). Everything
above the stores uses it; `store.location.open_durable` alone decides between a disk and a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.format.records import RunPlace
from holdfast.store.contract import Store, StoredObject


class RunHome(Protocol):
    """Where a run lies. Thread-safe."""

    @property
    def location_text(self) -> str:
        """The path where it was found last, or the URL."""
        ...

    @property
    def identity_text(self) -> str:
        """Text that differs for another place; empty if there is none yet."""
        ...

    def current_folder(self) -> Path:
        """Return the folder of this host's files of the run, where it is now.

        Raises:
            StorageError: The run's directory was deleted, replaced or unmounted.
        """
        ...

    def recorded_place(self) -> RunPlace | None:
        """Return the location as the run's record has it; None if there is none yet."""
        ...

    def has_lasting_inodes(self) -> bool:
        """Return whether the inode in `recorded_place` is the same each time the run is opened."""
        ...

    def unusable_reason(self) -> str | None:
        """Return why it cannot be used now; None if it can."""
        ...

    def is_gone(self) -> bool:
        """Return whether it was deleted for good."""
        ...

    def note_gone(self, reason: str) -> None:
        """Note that the run was found deleted; ignored where the home itself sees that."""
        ...

    def is_at(self, text: str) -> bool:
        """Return whether that path or URL leads here."""
        ...

    def release(self) -> None:
        """Give up what is held of it; a later use takes it again."""
        ...


class TimedObject(NamedTuple):
    """A small object, when it was written, and the time now, both by the store's clock."""

    data: bytes
    written_ns: int
    now_ns: int


class FleetingStore(Protocol):
    """Small objects that are replaced often, and need not survive the loss of power. Thread-safe.

    Errors are `StorageError`s, after which the object is unchanged.
    """

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an earlier one at once."""
        ...

    def read_timed(self, key: str) -> TimedObject | None:
        """Return an object with its times; None if there is none."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects below `prefix`."""
        ...

    def delete(self, *keys: str) -> None:
        """Remove objects; a missing object is not an error."""
        ...


class DurableStore(Store, Protocol):
    """The durable tier of one run."""

    @property
    def home(self) -> RunHome:
        """Where the run lies."""
        ...

    @property
    def request_count(self) -> int | None:
        """How many requests this process has made to a service; None: there is no service."""
        ...

    def is_unused(self) -> bool:
        """Return whether nothing is stored here, except what is renewed or temporary.

        Raises:
            NotARunError: The place can be none of a run.
            StorageError: It cannot be read.
        """
        ...

    def prepare_place(self) -> None:
        """Prepare an unused place for a new run, and check that one can be kept there.

        Another process may prepare it at the same time.

        Raises:
            StorageError: The place cannot be created, or cannot keep a run.
        """
        ...

    def has_object(self, key: str) -> bool:
        """Return whether the key has an object."""
        ...

    @property
    def fleeting(self) -> FleetingStore:
        """The run's objects that need not last, below the same keys."""
        ...
