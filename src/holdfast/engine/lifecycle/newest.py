"""The newest checkpoints of a durable tier, found without listing the others.

Manifests are listed by descending step, so the first page has the newest checkpoint of the
timeline, unless a page of abandoned ones is beyond it. The folders are listed from that checkpoint
on: they have its objects, and what an interrupted attempt left of later ones. So an opening takes
as many requests with 5,000 checkpoints as with 5.

What is left of earlier checkpoints is not found here. A commit lists everything, and removes that.

See docs/decisions/0031.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from holdfast.engine.lifecycle.attempts import attempt_sizes_bytes, read_attempts
from holdfast.engine.lifecycle.catalog import Listing, listings_of
from holdfast.format.names import (
    CHECKPOINTS,
    MANIFESTS,
    NO_ATTEMPT,
    STEP_MAX,
    AttemptId,
    CheckpointId,
    parse_manifest_key,
)
from holdfast.format.records import AttemptRecord
from holdfast.format.timeline import on_timeline
from holdfast.store.contract import Store
from holdfast.store.durable import DurableStore

PAGE_COUNT = 1_000
"""The manifests that are listed at once, as many as a page of S3 has."""
ORDERED_STEP_MAX = 10**8 - 1
"""Names of greater steps may sort before those of smaller ones: one more digit may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestListing:
    """The newest checkpoints at one moment, and all attempts.

    Attributes:
        numbers: the numbers of all attempts.
        attempts: the records of those on the timeline, by number.
        checkpoints: the newest committed checkpoints, at least down to the newest one of the
            timeline, and all others with a step of at least `since_step`; of these all objects.
        since_step: from which step on the folders were listed.
        doubtful: the attempts whose record or copy is missing or damaged, as far as was seen.
        is_over: the newest attempt had ended before the checkpoints were listed.
    """

    numbers: tuple[int, ...]
    attempts: dict[int, AttemptRecord]
    checkpoints: dict[CheckpointId, Listing]
    since_step: int
    doubtful: frozenset[int] = frozenset()
    is_over: bool = False

    @property
    def newest_number(self) -> int:
        """The number of the newest attempt; 0 if there is none."""
        return max(self.numbers, default=0)

    @property
    def newest_attempt(self) -> AttemptId:
        """The newest attempt; `NO_ATTEMPT` if there is none, or its record was removed just now."""
        record = self.attempts.get(self.newest_number)
        return record.attempt if record is not None else NO_ATTEMPT

    @property
    def committed_ids(self) -> frozenset[CheckpointId]:
        """The checkpoints with a manifest."""
        return frozenset(c for c, listing in self.checkpoints.items() if listing.is_committed)

    @property
    def uncommitted(self) -> dict[CheckpointId, Listing]:
        """The checkpoints without a manifest, or what is left of them."""
        return {c: listing for c, listing in self.checkpoints.items() if not listing.is_committed}

    @property
    def with_objects(self) -> dict[CheckpointId, Listing]:
        """The checkpoints whose objects are known."""
        return {c: listing for c, listing in self.checkpoints.items() if c.step >= self.since_step}


def list_newest(
    durable: DurableStore,
    known: MutableMapping[int, AttemptRecord] | None = None,
    since_step: int = STEP_MAX,
    has_ended: Callable[[AttemptRecord], bool] = lambda _: False,
) -> NewestListing:
    """List the newest checkpoints of a run.

    Args:
        durable: the run's store.
        known: records of attempts that were read before; those read now are added.
        since_step: the folders of checkpoints of this step and later ones are listed too.
        has_ended: returns whether the newest attempt has ended; called before the checkpoints are
            listed, which then have all that it committed.

    Raises:
        CheckpointDamagedError: an attempt's record is damaged, so the timeline is unknown.
        StorageError: the store.
    """
    sizes = attempt_sizes_bytes(durable)
    damaged: set[int] = set()
    attempts = read_attempts(durable, [*sizes], known, damaged)
    record = attempts.get(max(sizes, default=0))
    is_over = record is not None and has_ended(record)
    committed, newest = _committed(durable, attempts, since_step)
    since_step = min(since_step, newest.step if newest is not None else 0)
    if since_step > ORDERED_STEP_MAX:
        since_step = 0
    after = f"{CHECKPOINTS}/{since_step:09d}" if since_step else ""
    checkpoints = listings_of(durable.list_some(CHECKPOINTS, after=after, before=f"{MANIFESTS}/"))
    for checkpoint in committed:
        checkpoints.setdefault(checkpoint, Listing()).is_committed = True
    return NewestListing(
        numbers=tuple(sizes),
        attempts=attempts,
        checkpoints={c: checkpoints[c] for c in sorted(checkpoints)},
        since_step=since_step,
        doubtful=frozenset(
            number
            for number, (size, *copies) in sizes.items()
            if copies != [size] or number in damaged
        ),
        is_over=is_over,
    )


def newest_committed(store: Store, attempts: dict[int, AttemptRecord]) -> CheckpointId | None:
    """Return the newest committed checkpoint of the timeline of `attempts`; None if there is none.

    Raises:
        StorageError: the store.
    """
    return _committed(store, attempts, STEP_MAX)[1]


def _committed(
    durable: Store, attempts: dict[int, AttemptRecord], since_step: int
) -> tuple[list[CheckpointId], CheckpointId | None]:
    """Return the newest committed checkpoints, and the newest one of the timeline among them.

    Those of `since_step` and later ones are all there.
    """
    committed: list[CheckpointId] = []
    after = ""
    while True:
        page = durable.list_some(MANIFESTS, after=after, count_max=PAGE_COUNT)
        named = (parse_manifest_key(stored.key) for stored in page)
        committed += [checkpoint for checkpoint in named if checkpoint is not None]
        newest = next(reversed(on_timeline(committed, attempts)), None)
        # A step that is there twice may continue on the next page.
        needed = min(since_step, newest.step if newest is not None else 0)
        if len(page) < PAGE_COUNT or (committed and committed[-1].step < needed):
            return committed, newest
        after = page[-1].key
