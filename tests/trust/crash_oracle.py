"""Compute what must be there after a crash, from the marks of the log alone.

Nothing is asked of Holdfast. The timeline is that of docs/format.md. Preservation may have removed
what `LatestN` does not keep (see engine/retain): it keeps the newest of the timeline, and likewise
the newest of abandoned branches until the timeline has come as far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT_COUNT = 2
STEP_MAX = 10**15


class Id(NamedTuple):
    """A checkpoint, named without Holdfast's own class."""

    step: int
    attempt: int


# The marks.


@dataclass(frozen=True)
class Begun:
    """A trainer is about to save this checkpoint."""

    id: Id


@dataclass(frozen=True)
class Sealed:
    """Every rank was notified that its part is in RAM; `due`: it has to become durable."""

    id: Id
    due: bool = True


@dataclass(frozen=True)
class Durable:
    """The trainers were notified that it is durable."""

    id: Id


@dataclass(frozen=True)
class Deleting:
    """Its deletion was requested."""

    id: Id


@dataclass(frozen=True)
class Deleted:
    """The deletion was acknowledged."""

    id: Id


@dataclass(frozen=True)
class Attempting:
    """An attempt is about to begin."""

    attempt: int
    origin: Id | None


@dataclass(frozen=True)
class Attempted:
    """The attempt was acknowledged."""

    attempt: int


@dataclass(frozen=True)
class PowerLost:
    """What was in RAM is gone."""


Origins = dict[int, Id | None]


@dataclass
class Expectation:
    """What the marks up to a crash promise.

    `durable` has to be read whatever was lost, `sealed` besides where RAM was not; `newest` were
    acknowledged, and one as new as the newest of them has to be read.
    """

    begun: set[Id] = field(default_factory=set)
    durable: set[Id] = field(default_factory=set)
    sealed: set[Id] = field(default_factory=set)
    in_ram: set[Id] = field(default_factory=set)
    deleted: set[Id] = field(default_factory=set)
    origins: Origins = field(default_factory=dict)
    beginning: Attempting | None = None

    def take(self, mark: object) -> None:
        """Goes on by one mark."""
        if isinstance(mark, Begun):
            self.begun.add(mark.id)
        elif isinstance(mark, Sealed):
            self.in_ram.add(mark.id)
            if mark.due:
                self.sealed.add(mark.id)
        elif isinstance(mark, Durable):
            self.durable.add(mark.id)
            self._preserve()
        elif isinstance(mark, Deleting | Deleted):
            for held in (self.durable, self.sealed, self.in_ram):
                held.discard(mark.id)
            if isinstance(mark, Deleted):
                self.deleted.add(mark.id)
        elif isinstance(mark, PowerLost):
            self.sealed.clear()
            self.in_ram.clear()
        elif isinstance(mark, Attempting):
            if self.beginning is not None and self.beginning.attempt < mark.attempt:
                # Cut off, and yet it had begun: the next one goes by a higher number.
                self.origins[self.beginning.attempt] = self.beginning.origin
            self.beginning = mark
        elif isinstance(mark, Attempted):
            assert self.beginning is not None
            self.origins[mark.attempt] = self.beginning.origin
            self.beginning = None
            # RAM off the timeline is discarded, and never becomes durable.
            self.sealed &= self.durable | set(timeline(self.sealed, self.origins))

    def origins_if(self, newest: int) -> Origins:
        """The attempts, where `newest` is the newest one that is found."""
        found = dict(self.origins)
        if self.beginning is not None and newest == self.beginning.attempt:
            found[newest] = self.beginning.origin
        assert newest == max(found, default=0), f"attempt {newest} was never begun, or is lost"
        return found

    def must(self, *, with_ram: bool, newest: int) -> set[Id]:
        """What has to be read."""
        found = set(self.durable)
        if with_ram:
            on = set(timeline(self.sealed, self.origins_if(newest)))
            found |= {one for one in self.sealed if one in on}
        return found

    def floor(self, *, with_ram: bool, newest: int) -> int:
        """The step that the newest restorable checkpoint has at least; -1: none is promised."""
        acknowledged = self.durable | (self.in_ram if with_ram else set())
        on = timeline(acknowledged, self.origins_if(newest))
        return on[-1].step if on else -1

    def _preserve(self) -> None:
        on = timeline(self.durable, self.origins)
        beside = sorted(self.durable - set(on))
        newest = on[-1] if on else Id(-1, 0)
        passed = [c for c in beside if c.step <= newest.step and c.attempt < newest.attempt]
        left = {c.step: c for c in beside if c not in passed}
        kept = set(on[-KEPT_COUNT:]) | set([left[s] for s in sorted(left)][-KEPT_COUNT:])
        gone = self.durable - kept if on else set()
        self.durable -= gone
        self.sealed -= gone
        self.in_ram -= gone


def timeline(found: Iterable[Id], origins: Origins) -> list[Id]:
    """Those on the timeline of the newest attempt, by ascending step (docs/format.md)."""
    if not origins:
        return []
    attempt = max(origins)
    limits = {attempt: STEP_MAX}
    while (origin := origins.get(attempt)) is not None and origin.attempt < attempt:
        attempt = origin.attempt
        limits[attempt] = origin.step
    by_step = {c.step: c for c in sorted(found) if c.step <= limits.get(c.attempt, -1)}
    return [by_step[step] for step in sorted(by_step)]


@dataclass(frozen=True)
class Seen:
    """The result of one look at a run: what could be read, right to the bit, and the timeline."""

    readable: frozenset[Id]
    timeline: tuple[Id, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a state: looks before an agent, after it, and after one more save."""

    before: Seen
    adopted: Seen
    after: Seen
    newest_attempt: int
    origin: Id | None
    saved: Id
    failed: tuple[str, ...]
    left: tuple[str, ...]


def check(outcome: Outcome, expected: Expectation, *, with_ram: bool) -> None:
    """Compare an outcome with what was promised.

    Raises:
        AssertionError: a promise is broken; the message names it.
    """
    newest = outcome.newest_attempt
    origins = expected.origins_if(newest)
    must = expected.must(with_ram=with_ram, newest=newest)
    floor = expected.floor(with_ram=with_ram, newest=newest)
    for when, seen in (("before an agent", outcome.before), ("adopted", outcome.adopted)):
        lost = sorted(must - seen.readable)
        assert not lost, f"{when}: acknowledged and lost: {lost}"
        never = sorted(seen.readable - expected.begun)
        assert not never, f"{when}: never begun: {never}"
        back = sorted(seen.readable & expected.deleted)
        assert not back, f"{when}: deleted and back: {back}"
        on = tuple(timeline(seen.readable, origins))
        assert seen.timeline == on, f"{when}: the timeline is {seen.timeline}, expected {on}"
        step = on[-1].step if on else -1
        assert step >= floor, f"{when}: the newest step is {step}, acknowledged was {floor}"
    assert not outcome.failed, f"told as failed: {outcome.failed}"
    adopted = outcome.adopted.timeline
    assert outcome.origin == (adopted[-1] if adopted else None), "went on from another one"
    origin = outcome.origin
    assert outcome.saved == Id(origin.step + 1 if origin else 1, newest + 1)
    kept = (*((origin,) if origin else ()), outcome.saved)
    assert outcome.after.timeline == kept, f"after a save: {outcome.after.timeline}"
    assert outcome.after.readable - {outcome.saved} <= outcome.adopted.readable
    assert not outcome.left, f"left lying about: {outcome.left}"
