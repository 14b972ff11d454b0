"""Recovery when a run is opened: commit complete checkpoints and remove incomplete ones.

A checkpoint without a manifest is the rest of an interrupted save. If all its parts are durable and
it is on the timeline, only the commit is missing. If a part is missing it cannot be completed,
unless the part is still in RAM. Damaged records of attempts are rewritten from their intact copies.

Only the newest checkpoints are looked at. The first commit of an attempt removes what is left of
earlier ones, and checks the run's record and all records of attempts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.engine.lifecycle.attempts import mend_attempts
from holdfast.engine.lifecycle.catalog import Listing, left_over
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.lifecycle.newest import NewestListing, list_newest
from holdfast.engine.lifecycle.references import ReusedImages, remove_durable
from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError
from holdfast.format.names import (
    ATTEMPTS,
    CHECKPOINTS,
    LEASES,
    RUN_FILE,
    AttemptId,
    CheckpointId,
    checkpoint_folder,
)
from holdfast.format.timeline import last_steps
from holdfast.store.durable import DurableStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The checkpoints committed and removed, and the keys of the records that were rewritten."""

    committed: tuple[CheckpointId, ...]
    cleared: tuple[CheckpointId, ...]
    mended: tuple[str, ...]


def recover(
    durable: DurableStore,
    in_care: Collection[CheckpointId],
    attempt: AttemptId | None = None,
    images: ReusedImages | None = None,
    listing: NewestListing | None = None,
) -> Recovery:
    """Commit or remove the uncommitted checkpoints of `listing`, except those `in_care`.

    Args:
        durable: the run's store.
        in_care: checkpoints with parts in RAM that other processes still make durable.
        attempt: the current attempt; its checkpoints and those of later ones are not touched.
            None: no process uses the run, so all unfinished objects are removed, except those of
            attempts that began after the listing.
        images: what checkpoints reuse, if this process also commits at the same time.
        listing: the newest checkpoints, listed while no other process wrote to the run; None: they
            are listed here.

    Returns:
        The checkpoints committed and removed, and the repaired records.

    Raises:
        StorageError: recovery is incomplete; the call may be repeated.
    """
    images = images or ReusedImages()
    newest = listing or list_newest(durable)
    mended = tuple(mend_attempts(durable, sorted(newest.doubtful), {}))
    limits = last_steps(newest.attempts)
    committed, remains = [], []
    # Images are reused by later checkpoints of their attempt alone, and those are listed.
    listed = newest.with_objects
    for checkpoint, entry in listed.items():
        newest_number = attempt.number if attempt is not None else newest.newest_number
        is_present = checkpoint.attempt == attempt or checkpoint.attempt.number > newest_number
        if entry.is_committed or checkpoint in in_care or is_present:
            continue
        counts = checkpoint.step <= limits.get(checkpoint.attempt, -1)
        if counts and _finish(durable, checkpoint, entry, images):
            durable.discard_unfinished(checkpoint_folder(checkpoint))
            committed.append(checkpoint)
        else:
            remains.append(checkpoint)
    # After the commits: a checkpoint that was committed just now may reuse images of the remains.
    cleared = remove_durable(durable, listed, remains, images=images, in_care=in_care)
    for prefix in (RUN_FILE, ATTEMPTS, CHECKPOINTS, LEASES) if attempt is None else ():
        durable.discard_unfinished(prefix)
    return Recovery(committed=tuple(committed), cleared=tuple(cleared), mended=mended)


def finish_copies(remote: DurableStore, listing: NewestListing) -> None:
    """Commit the checkpoints of a remote tier whose parts are all there; note that in `listing`.

    Their copies were interrupted before the manifest. A manifest follows from the parts, so it does
    not matter whether the agent that copied them still lives, and commits them too.

    Raises:
        StorageError: some may be uncommitted still; the call may be repeated.
    """
    limits, remains = last_steps(listing.attempts), left_over(listing.checkpoints)
    for checkpoint, entry in listing.with_objects.items():
        counts = checkpoint.step <= limits.get(checkpoint.attempt, -1)
        if not entry.is_committed and counts and checkpoint not in remains:
            entry.is_committed = _finish(remote, checkpoint, entry, ReusedImages())


def _finish(
    durable: DurableStore, checkpoint: CheckpointId, listing: Listing, images: ReusedImages
) -> bool:
    if not listing.is_complete:
        return False
    try:
        commit(durable, checkpoint, len(listing.parts), images.committing)
    except (CheckpointDamagedError, ObjectNotFoundError):
        return False
    return True
