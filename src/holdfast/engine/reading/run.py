"""One run as a reader sees it: its durable tier, and this host's RAM tier where there is one.

It is the one read model of a run, for the public read-only handle and for the command line. It
writes nothing and takes no lock of the run. How the RAM tier of a host is found is the caller's
knowledge: `find_ram` is called for each listing, because an agent may start or end in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine.lifecycle.attempts import newest_tier
from holdfast.engine.reading.view import View, newest_view_of, view_of
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.store.contract import ReadableStore
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation
from holdfast.store.ram import RamStore


def _no_ram() -> RamStore | None:
    return None


def _no_remote() -> DurableStore | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableRun:
    """A run that is read.

    A directory that is a copy of a run, and was not opened yet, has the original's `run_id`. The
    agents and the RAM of that id are not its own.

    `find_remote` returns the remote tier of the run, where it was trained with one. A reader of
    checkpoints reads the tier that it has opened, and the remote tier for a step that it lacks.
    """

    location: RunLocation
    run_id: str
    durable: DurableStore
    find_ram: Callable[[], RamStore | None] = _no_ram
    find_remote: Callable[[], DurableStore | None] = _no_remote
    is_copy: bool = False

    @property
    def agents_id(self) -> str:
        """The id that its own agents go by; empty where it can have none yet."""
        return "" if self.is_copy else self.run_id

    @property
    def stores(self) -> list[ReadableStore]:
        """The tiers as they are now, the nearest first."""
        ram = self.find_ram()
        return [ram, self.durable] if ram is not None else [self.durable]

    def load_view(self, step: int | None = None) -> View:
        """Return what the tiers hold now; where they lack `step`, what the remote tier holds too.

        Raises:
            CheckpointDamagedError: an attempt's record is damaged, so the timeline is unknown.
            StorageError: a tier cannot be listed.
            InvalidArgumentError: the remote tier is in a bucket, and this host cannot open it.
        """
        view = view_of(self.stores, self.durable)
        if step is None or any(checkpoint.step == step for checkpoint in view.timeline):
            return view
        try:
            remote = self.find_remote()
            if remote is None:
                return view
            return view_of([*self.stores, remote], newest_tier([self.durable, remote]))
        except (StorageError, InvalidArgumentError) as error:
            raise type(error)(
                f"find step {step}: {self.location} lacks it, and its remote tier cannot be read: "
                f"{error}"
            ) from error

    def load_newest_view(self) -> View:
        """Return the newest checkpoints that the tiers hold now, with few requests.

        Raises:
            CheckpointDamagedError, StorageError: as `load_view`.
        """
        return newest_view_of(self.stores, self.durable)
