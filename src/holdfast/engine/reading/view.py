"""The checkpoints of a run that can be read now, from all tiers reachable from this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import Listings, list_stores
from holdfast.engine.reading.sources import CheckpointSources, find_sources, is_sound, readable
from holdfast.errors import StepNotFoundError, StepUncommittedError
from holdfast.format.names import CheckpointId
from holdfast.format.timeline import last_steps, on_timeline
from holdfast.store.contract import ReadableStore
from holdfast.store.ram import RamStore

LISTINGS_MAX = 20
"""How often a run is listed for one answer, where it deletes checkpoints meanwhile."""


@dataclass(frozen=True, slots=True)
class View:
    """The listings of the stores at one moment; `timeline` by ascending step, judged by names.

    `unlisted` are the reasons why peers could not be listed.
    """

    stores: tuple[ReadableStore, ...]
    listings: Listings
    timeline: tuple[CheckpointId, ...]
    limits: dict[int, int]
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
        found = (entry for tier in self.listings.values() for entry in tier.items())
        # A folder with images alone is no save: later checkpoints reuse them.
        begun = {c for c, listing in found if c.step == step and listing.has_records}
        if any(c.step <= self.limits.get(c.attempt, -1) for c in begun):
            raise StepUncommittedError(
                f"find step {step}: its save was begun and never committed; choose another step"
            )
        steps = [c.step for c in self.timeline]
        shown = ", ".join(map(str, steps[-10:]))
        raise StepNotFoundError(
            f"find step {step}: it is not among the {len(steps)} saved steps of this timeline"
            + (f" (the last ones: {shown})" if steps else "")
            + (f"; attempt {max(begun).attempt} saved it on an abandoned branch" if begun else "")
        )

    def sources(self, checkpoint: CheckpointId) -> CheckpointSources:
        """Return the sources of a checkpoint. Raises the errors of `find_sources`."""
        found = find_sources(checkpoint, self.stores, self.listings)
        return replace(found, passed_over=self.unlisted + found.passed_over)


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


def view_of(stores: Sequence[ReadableStore], durable: ReadableStore) -> View:
    """Return a view of the stores now; the timeline is read from `durable`."""
    listings, unlisted = list_stores(stores)
    attempts = read_attempts(durable)
    timeline = on_timeline(readable(listings), attempts)
    return View(tuple(stores), listings, tuple(timeline), last_steps(attempts), unlisted)


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
