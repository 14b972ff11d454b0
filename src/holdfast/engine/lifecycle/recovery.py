"""Opening a run: finishing what was nearly committed, and clearing what never can be.

A checkpoint without a manifest is one that an interrupted save left. Where all its parts are
durable and it stands on the timeline, the commit is all that was missing. Where a part is missing
it cannot become whole, unless the part still stands in RAM. Records of the run and of its attempts
that are bad, and whose other copy is good, are written anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.engine.lifecycle.attempts import mend_attempts, read_attempts
from holdfast.engine.lifecycle.catalog import Listing, list_checkpoints
from holdfast.engine.lifecycle.commit import commit, remove
from holdfast.engine.lifecycle.run import mend_run
from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError
from holdfast.format.names import (
    ATTEMPTS,
    CHECKPOINTS,
    LEASES,
    RUN_FILE,
    CheckpointId,
    checkpoint_folder,
)
from holdfast.format.records import RunPlace
from holdfast.format.timeline import last_steps
from holdfast.store.contract import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What was finished, what was cleared, and the keys of the records that were written anew."""

    committed: tuple[CheckpointId, ...]
    cleared: tuple[CheckpointId, ...]
    mended: tuple[str, ...]


def recover(
    durable: Store,
    in_care: Collection[CheckpointId],
    attempt: int | None = None,
    place: RunPlace | None = None,
) -> Recovery:
    """Finishes or clears every uncommitted checkpoint but those `in_care`, whose parts are in RAM.

    Args:
        durable: the run's store.
        in_care: what others make durable still.
        attempt: the run's present one, whose checkpoints and those of later ones are let alone;
            None: no process works on the run, and whatever is half written anywhere is removed.
        place: where the run is, for a record of the run that is written anew.

    Raises:
        StorageError: some of it is not done; the call may be repeated.
    """
    mended = (*mend_run(durable, place), *mend_attempts(durable))
    limits = last_steps(read_attempts(durable))
    committed, cleared = [], []
    for checkpoint, listing in list_checkpoints(durable).items():
        is_present = attempt is not None and checkpoint.attempt >= attempt
        if listing.is_committed or checkpoint in in_care or is_present:
            continue
        counts = checkpoint.step <= limits.get(checkpoint.attempt, -1)
        if counts and _finish(durable, checkpoint, listing):
            durable.discard_unfinished(checkpoint_folder(checkpoint))
            committed.append(checkpoint)
        else:
            remove(durable, checkpoint, listing)
            cleared.append(checkpoint)
    for prefix in (RUN_FILE, ATTEMPTS, CHECKPOINTS, LEASES) if attempt is None else ():
        durable.discard_unfinished(prefix)
    return Recovery(committed=tuple(committed), cleared=tuple(cleared), mended=mended)


def _finish(durable: Store, checkpoint: CheckpointId, listing: Listing) -> bool:
    if not listing.is_complete:
        return False
    try:
        commit(durable, checkpoint, len(listing.parts))
    except (CheckpointDamagedError, ObjectNotFoundError):
        return False
    return True
