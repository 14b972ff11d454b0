"""The checkpoints of a run that can be read now, from all tiers reachable from this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import Listing, Listings, list_folder, list_stores
from holdfast.engine.lifecycle.newest import NewestListing, list_newest
from holdfast.engine.reading.sources import CheckpointSources, find_sources, is_sound, readable
from holdfast.errors import (
    CheckpointDamagedError,
    StepNotFoundError,
    StepUncommittedError,
    StorageError,
)
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.timeline import last_steps, on_timeline
from holdfast.store.contract import ReadableStore
from holdfast.store.durable import DurableStore
from holdfast.store.ram import RamStore

LISTINGS_MAX = 20
"""How often a run is listed for one answer, where it deletes checkpoints meanwhile."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class View:
    """The listings of the stores at one moment; `timeline` by ascending step, judged by names.

    `unlisted` are the reasons why peers could not be listed.
    """

    stores: tuple[ReadableStore, ...]
    listings: Listings
    timeline: tuple[CheckpointId, ...]
    limits: dict[AttemptId, int]
    unlisted: tuple[str, ...] = ()

    def sound(self) -> list[CheckpointId]:
        """Return the checkpoints of the timeline whose records and image sizes are intact."""
        return [c for c in self.timeline if is_sound(c, self.stores, self.listings)]

    def newest_sound(self) -> CheckpointId | None:
        """Return the newest sound checkpoint of the timeline."""
        newest_first = reversed(self.timeline)
        return next((c for c in newest_first if is_sound(c, self.stores, self.listings)), None)

    def find(self, step: int) -> CheckpointId:
        """Return the checkpoint of `step` on the timeline.

        Raises:
            StepUncommittedError: a save of that step was begun and not finished.
            StepNotFoundError: the step was never saved on this timeline; lists the saved ones.
        """
        for checkpoint in self.timeline:
            if checkpoint.step == step:
                return checkpoint
        entries = (entry for tier in self.listings.values() for entry in tier.items())
        # A folder with images alone is no save: later checkpoints reuse them.
        begun = {c for c, listing in entries if c.step == step and listing.has_records}
        if any(c.step <= self.limits.get(c.attempt, -1) for c in begun):
            raise StepUncommittedError(
                f"find step {step}: it has files and no manifest, because its save was not "
                "committed or its delete was interrupted; choose another step"
            )
        steps = [c.step for c in self.timeline]
        shown = ", ".join(map(str, steps[-10:]))
        raise StepNotFoundError(
            f"find step {step}: it is not among the {len(steps)} saved steps of this timeline"
            + (f" (the last ones: {shown})" if steps else "")
            + (f"; attempt {max(begun).attempt} saved it on an abandoned branch" if begun else "")
        )

    def lists_as(self, other: View, checkpoint: CheckpointId) -> bool:
        """Return whether it lists the same objects of a checkpoint as `other`."""
        own, others = (
            {name: tier.get(checkpoint) for name, tier in view.listings.items()}
            for view in (self, other)
        )
        return own == others

    def sources(self, checkpoint: CheckpointId) -> CheckpointSources:
        """Return the sources of a checkpoint. Raises the errors of `find_sources`."""
        sources = find_sources(checkpoint, self.stores, self.listings)
        return replace(sources, passed_over=self.unlisted + sources.passed_over)


@dataclass(frozen=True, slots=True)
class RamTiers:
    """The RAM tiers that can be read from here: this host's, if any, and its peers'."""

    folder: Path | None
    peers: Sequence[ReadableStore]
    clock: Clock

    def stores(self) -> list[ReadableStore]:
        """Return the stores, the nearest first."""
        own = [RamStore(self.folder, _reads_only, self.clock)] if self.folder is not None else []
        return [*own, *self.peers]


def _reads_only(size_bytes: int) -> str:
    raise AssertionError("a view of the RAM tier does not write")


def view_of(stores: Sequence[ReadableStore], durable: DurableStore) -> View:
    """Return a view of the stores now; the timeline is read from `durable`."""
    listings, unlisted = list_stores(stores)
    attempts = read_attempts(durable)
    timeline = on_timeline(readable(listings), attempts)
    return View(tuple(stores), listings, tuple(timeline), last_steps(attempts), unlisted)


def newest_view_of(
    stores: Sequence[ReadableStore],
    durable: DurableStore,
    newest: NewestListing | None = None,
    remote: DurableStore | None = None,
) -> View:
    """Return a view with the newest checkpoints, at least down to the newest one of the timeline.

    Args:
        stores: the tiers, `durable` and `remote` among them.
        durable: the durable tier.
        newest: its listing; None: it is listed now.
        remote: the remote tier, if there is one. Where it cannot be listed it counts as empty, and
            the reason is in `unlisted`.

    Raises:
        CheckpointDamagedError: an attempt's record is damaged, so the timeline is unknown.
        StorageError: the durable tier cannot be listed.
    """
    newest = newest or list_newest(durable)
    tiers = {durable.name: (durable, newest)}
    problems = []
    if remote is not None:
        try:
            tiers[remote.name] = remote, list_newest(remote, dict(newest.attempts))
        except (CheckpointDamagedError, StorageError) as error:
            tiers[remote.name] = remote, replace(newest, checkpoints={}, since_step=0)
            problems.append(str(error))
    others, unlisted = list_stores([store for store in stores if store.name not in tiers])
    listings = {**others, **{name: tier.checkpoints for name, (_, tier) in tiers.items()}}
    timeline = on_timeline(readable(listings), newest.attempts)
    lasting = {name: _ListingsOnDemand(store, tier) for name, (store, tier) in tiers.items()}
    limits = last_steps(newest.attempts)
    all_listings = {**others, **lasting}
    return View(tuple(stores), all_listings, tuple(timeline), limits, (*unlisted, *problems))


class _ListingsOnDemand(Mapping[CheckpointId, Listing]):
    """The newest listings of the durable tier; the folder of another checkpoint is listed on use.

    Iterates over the newest ones alone.
    """

    def __init__(self, durable: DurableStore, newest: NewestListing) -> None:
        self._durable = durable
        self._newest = newest.checkpoints
        self._listed = dict(newest.with_objects)
        self._since_step = newest.since_step

    def __getitem__(self, checkpoint: CheckpointId) -> Listing:
        if checkpoint not in self._listed and checkpoint.step < self._since_step:
            listing = list_folder(self._durable, checkpoint)
            listing.is_committed = checkpoint in self._newest
            self._listed[checkpoint] = listing
        listing = self._listed[checkpoint]
        if not listing.sizes_bytes and not listing.is_committed:
            raise KeyError(checkpoint)
        return listing

    def __iter__(self) -> Iterator[CheckpointId]:
        return iter(self._newest)

    def __len__(self) -> int:
        return len(self._newest)


def newest_first(newest: Callable[[], View], whole: Callable[[], View]) -> Callable[[], View]:
    """Return a function that returns `newest()` when it is called first, and later `whole()`.

    For a reader that tries the newest checkpoint, and looks again only if that cannot be read.
    """
    views = [newest]
    return lambda: (views.pop() if views else whole)()


def find_sound(look_again: Callable[[], View]) -> list[CheckpointId]:
    """Return the checkpoints that can be read now, ascending, beside a run that deletes some.

    A checkpoint that is deleted between the listing and the check of its records is not sound. Its
    successor is missing from that listing, so the run is listed again until the listing holds, or
    `LISTINGS_MAX` times.
    """
    for _ in range(LISTINGS_MAX):
        view = look_again()
        sound = view.sound()
        if len(sound) == len(view.timeline) or look_again().timeline == view.timeline:
            break
    return sound


def find_newest_sound(look_again: Callable[[], View]) -> CheckpointId | None:
    """Return the newest checkpoint that can be read now; None where there is none.

    Listed again as `find_sound` does, while the newest one of the timeline is not sound.
    """
    for _ in range(LISTINGS_MAX):
        view = look_again()
        newest = view.newest_sound()
        if not view.timeline or newest == view.timeline[-1]:
            break
        if look_again().timeline == view.timeline:
            break
    return newest


def read_step(
    look_again: Callable[[], View], step: int, read: Callable[[View, CheckpointId], Found]
) -> Found:
    """Return what `read` returns for the checkpoint of `step`, which the run may delete meanwhile.

    The run is listed again after an error of `read`. The error is raised if the checkpoint is
    listed as before, or after `LISTINGS_MAX` listings.

    Raises:
        StepNotFoundError: the step was never saved, or it was deleted meanwhile.
        StepUncommittedError: as `View.find`.
        CheckpointDamagedError, StorageError: the errors of `read`.
    """
    view = look_again()
    checkpoint = view.find(step)
    for _ in range(LISTINGS_MAX):
        try:
            return read(view, checkpoint)
        except (CheckpointDamagedError, StorageError) as error:
            failed, problem = view, error
        view = look_again()
        try:
            checkpoint = view.find(step)
        except StepUncommittedError:
            # It was complete before.
            raise StepNotFoundError(f"find step {step}: it was deleted meanwhile") from problem
        if view.lists_as(failed, checkpoint):
            break
    raise problem
