"""Detection of copied runs: whether a directory is the run in its record, or a copy of it.

A run's record contains the inode and the path of the run's directory. A copy contains the
original's record, so its location differs from the recorded one. It becomes a run of its own with a
new id; its attempts and checkpoints are unchanged and can be restored.

Invariants:
- Opening a copy does not change the original.
- Processes that open a copy concurrently agree on one new id: it is created once, by put-if-absent
  of an object that names the copy's location.

See docs/decisions/0019.
"""

from __future__ import annotations

import contextlib
import logging
from enum import Enum

import xxhash

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import attempt_numbers
from holdfast.engine.lifecycle.run import read_run, read_run_record
from holdfast.errors import HoldfastError, ObjectNotFoundError
from holdfast.format.names import COPIES, REMOTE_FILE, RUN_FILE
from holdfast.format.records import RunPlace, RunRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.durable import DurableStore, RunHome
from holdfast.store.location import RunLocation, open_durable

log = logging.getLogger(__name__)


def absence_text(place: str, run_id: str, clock: Clock) -> str:
    """Return in words that a run is not at a path or URL; empty: it is, or that is not known.

    One that has lost its record alone is there: its attempts have the same fields.
    """
    try:
        store = open_durable(place, clock)
        found = read_run_record(store, place).run_id
    except ObjectNotFoundError:
        with contextlib.suppress(HoldfastError):
            if not attempt_numbers(store):
                return (
                    f"the run at {place} is not there any more (removed, unmounted, or moved to "
                    "another file system)"
                )
        return ""
    except HoldfastError:
        return ""
    if found == run_id:
        return ""
    return f"the run at {place} is another one than before ({found}, where {run_id} was)"


class Finding(Enum):
    """The relation between a directory and the run in its record."""

    SAME = "same"
    """The run's directory, at the recorded location; or the record has no location."""
    MOVED = "moved"
    """The run's directory, at another location than the recorded one."""
    DISPLACED = "displaced"
    """Another directory with the run's record, and the recorded place does not have the run.

    The run was moved to another file system or restored from a backup, or this is a copy of a run
    that was deleted or renamed. The directory alone does not show which.
    """
    COPY = "copy"
    """Another directory, with a copy of the run's record."""


def judge(
    recorded: RunPlace | None, found: RunPlace, *, inodes_last: bool, other_inode: int | None
) -> Finding:
    """Return the relation between the directory `found` and the run recorded at `recorded`.

    Args:
        recorded: the location in the record; None if it has none.
        found: the location of the directory that contains the record.
        inodes_last: whether its file system's inode numbers are permanent (`has_lasting_inodes`).
        other_inode: the inode of another directory at the recorded path that has a record of the
            same run; None if there is no such directory.
    """
    if recorded is None:
        return Finding.SAME
    if RunLocation(recorded.path).is_url != RunLocation(found.path).is_url:
        # Between a file system and a bucket nothing can be moved.
        return Finding.COPY
    if inodes_last:
        # Inode numbers are per file system. Of two directories with equal numbers (two mount
        # points, for example), the one at the recorded path is the original.
        if found.inode != recorded.inode and other_inode is None:
            return Finding.DISPLACED
        is_copy = found.inode != recorded.inode or other_inode == recorded.inode
    else:
        is_copy = found.path != recorded.path and other_inode is not None
    if is_copy:
        return Finding.COPY
    return Finding.SAME if found == recorded else Finding.MOVED


def find(store: DurableStore, record: RunRecord, clock: Clock) -> Finding:
    """Return the relation of the store's directory to the run in its `record`. Read-only."""
    place = store.home.recorded_place()
    if place is None or record.place is None:
        return Finding.SAME
    return judge(
        record.place,
        place,
        inodes_last=store.home.has_lasting_inodes(),
        other_inode=_other_inode(store.home, record, record.place, clock),
    )


def settle(store: DurableStore, record: RunRecord, finding: Finding, clock: Clock) -> RunRecord:
    """Return the record of the run in the store's directory, rewritten if it moved or is a copy.

    A directory that is `DISPLACED` is settled as a copy; a caller that has proof of a move passes
    `MOVED`.

    Raises:
        StorageError: the record cannot be written; the call may be repeated.
    """
    place = store.home.recorded_place()
    if finding is Finding.SAME or place is None:
        return record
    if finding is Finding.MOVED:
        settled = RunRecord(
            run_id=record.run_id, time=record.time, place=place, copied_from=record.copied_from
        )
    else:
        settled = _record_of_copy(store, record, place, clock)
        # It is the original's remote tier.
        store.delete(REMOTE_FILE)
        log.warning(
            "%s is a copy of run %s: it continues as run %s, with all that was copied",
            place.path,
            record.run_id,
            settled.run_id,
        )
    data = seal(settled)
    store.put(RUN_FILE, data)
    return settled


def _record_of_copy(
    store: DurableStore, original: RunRecord, place: RunPlace, clock: Clock
) -> RunRecord:
    """Return the copy's own record, created by the first process that gets here."""
    token = xxhash.xxh3_128_hexdigest(f"{original.run_id} {place.inode} {place.path}".encode())
    key = f"{COPIES}/{token}.json"
    drawn = RunRecord(
        run_id=clock.new_token(), time=clock.now(), place=place, copied_from=original.run_id
    )
    store.put_if_absent(key, seal(drawn))
    return unseal(store.get(key), RunRecord, key)


def _other_inode(home: RunHome, record: RunRecord, recorded: RunPlace, clock: Clock) -> int | None:
    # A place that cannot be read, or has no run, is not the original.
    with contextlib.suppress(HoldfastError, OSError):
        if not home.is_at(recorded.path):
            other = open_durable(recorded.path, clock)
            place = other.home.recorded_place()
            if place is not None and read_run(other, recorded.path).run_id == record.run_id:
                return place.inode
    return None
