"""Share one listing of the durable tier among the steps of an opening.

The recovery lists it, or the start of an attempt. The start, its leader and the trainers' first
restore use the same listing. That is safe beside other processes:

- A start that uses an old listing may choose a number that another start has taken. The put of the
  attempt's record refuses it, and the start lists again.
- Once the attempt has begun, no older one commits (`check_not_fenced`), and its own first commit
  needs a part of each rank. So until a rank on this host has sealed a part, checkpoints may vanish
  and none is added. A reader of one that has vanished fails, and lists by itself.
- Whatever this agent writes or removes ends the use of the listing.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from holdfast.clock import Clock
from holdfast.engine.lifecycle.catalog import Listing
from holdfast.engine.lifecycle.newest import NewestListing
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.format.timeline import on_timeline
from holdfast.host.wire.protocol import DurableListing, ListedCheckpoint

OPENING_SECS = 60.0
"""How old a listing may be that a start uses, and the leader of a host without peers."""
LEADER_SECS = 5.0
"""How old a listing may be that the leader of several hosts uses.

A host of the attempt before may have written parts since, while the start waited for its lease.
"""


class OpeningListing:
    """The listing that the steps of an opening share, as long as it holds. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._listing: NewestListing | None = None
        self._listed_at_secs = 0.0
        self._is_for_start = self._is_for_leader = False
        self._leader_secs = 0.0
        self._changes = 0
        self._open_attempt = NO_ATTEMPT
        """The attempt whose readers may still be given a listing."""

    @property
    def changes(self) -> int:
        """The number of changes so far; given to `keep` with a listing that was begun then."""
        return self._changes

    def keep(self, listing: NewestListing, changes: int, *, is_for_start: bool = False) -> None:
        """Keep a listing, unless something has changed since it was begun."""
        with self._lock:
            if changes == self._changes:
                self._listing, self._listed_at_secs = listing, self._clock.monotonic()
                self._is_for_start = self._is_for_leader = is_for_start
                # Only a host without peers lists before a start.
                self._leader_secs = OPENING_SECS if is_for_start else LEADER_SECS

    def forget_listing(self) -> None:
        """End the use of the listing: what it shows has changed, or may change from now on."""
        with self._lock:
            self._changes += 1
            self._listing = None
            self._open_attempt = NO_ATTEMPT

    def on_joined(self, attempt: AttemptId) -> None:
        """Note that an attempt has begun, and that none of its ranks here has sealed a part."""
        with self._lock:
            self._open_attempt = attempt

    def is_open_for(self, attempt: AttemptId) -> bool:
        """Return whether readers of that attempt may still be given a listing."""
        return self._open_attempt == attempt

    def take_for_start(self) -> NewestListing | None:
        """Return the listing for the start of an attempt, once."""
        with self._lock:
            is_good, self._is_for_start = self._is_for_start, False
            return self._listing if is_good and self._age_secs() <= OPENING_SECS else None

    def take_for_leader(self, attempt: AttemptId, since_step: int) -> NewestListing | None:
        """Return the listing for the leader of an attempt that began here, once."""
        with self._lock:
            listing = self._listing
            is_good, self._is_for_leader = self._is_for_leader, False
            if listing is None or not is_good or listing.newest_attempt != attempt:
                return None
            if self._age_secs() > self._leader_secs:
                return None
            return listing if listing.since_step <= since_step else None

    def begun(self, record: AttemptRecord) -> None:
        """Add the attempt that has begun here, which continues from what the listing shows."""
        with self._lock:
            listing = self._listing
            if listing is None or listing.newest_number != record.attempt.number - 1:
                self._listing = None
                return
            attempts = {**listing.attempts, record.attempt.number: record}
            if newest_of(listing, attempts) != newest_of(listing, listing.attempts):
                # It goes back to an earlier checkpoint, of which less was listed.
                self._listing = None
                return
            numbers = (*listing.numbers, record.attempt.number)
            self._listing = replace(listing, numbers=numbers, attempts=attempts, is_over=False)
            self._is_for_leader = True

    def has_whole(self, number: int) -> bool:
        """Return whether that attempt's record and its copy were whole when it was listed."""
        with self._lock:
            listing = self._listing
            is_newest = listing is not None and listing.newest_number == number
            return listing is not None and is_newest and number not in listing.doubtful

    def of_attempt(self, attempt: AttemptId) -> NewestListing | None:
        """Return the listing for readers of that attempt."""
        with self._lock:
            listing = self._listing
            return listing if listing is not None and listing.newest_attempt == attempt else None

    def _age_secs(self) -> float:
        return self._clock.monotonic() - self._listed_at_secs


def listing_message(listing: NewestListing) -> DurableListing:
    """Return a listing as a message to a trainer."""
    return DurableListing(
        numbers=listing.numbers,
        attempts=tuple(listing.attempts.values()),
        checkpoints=tuple(
            ListedCheckpoint(id=checkpoint, committed=listed.is_committed, sizes=listed.sizes_bytes)
            for checkpoint, listed in listing.checkpoints.items()
        ),
        since_step=listing.since_step,
    )


def listing_in(message: DurableListing) -> NewestListing:
    """Return the listing in a message."""
    return NewestListing(
        numbers=message.numbers,
        attempts={record.attempt.number: record for record in message.attempts},
        checkpoints={
            listed.id: Listing(dict(listed.sizes), listed.committed)
            for listed in message.checkpoints
        },
        since_step=message.since_step,
    )


def newest_of(listing: NewestListing, attempts: dict[int, AttemptRecord]) -> CheckpointId | None:
    """Return the newest committed checkpoint on the timeline of these attempts."""
    committed = (c for c, listed in listing.checkpoints.items() if listed.is_committed)
    return next(reversed(on_timeline(committed, attempts)), None)
