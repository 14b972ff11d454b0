"""Decide whether a directory that is not at its recorded place is the run, moved, or a copy of it.

`mv` to another file system, and a backup that is put back, give a run's directory another inode, as
copying does. Two things show that the run itself was moved:

- RAM of this host has newer checkpoints of this very directory, whose place is known to be gone.
- Its other tier has the same id. Attempts are numbered there, so that two directories with one
  remote tier never train at the same time.

Without either, the directory is a copy and becomes a run of its own. If RAM has newer checkpoints
and it cannot be decided whose they are, the start is refused: as a copy it would lose them.

See docs/decisions/0039.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.identity import Finding, find
from holdfast.engine.lifecycle.newest import newest_committed
from holdfast.engine.lifecycle.run import read_run_record
from holdfast.errors import HoldfastError, RunBusyError, WaitInterruptedError
from holdfast.format.names import CheckpointId, age_of
from holdfast.format.records import RunRecord
from holdfast.host.tiers.ram_place import RamPlace, note_place, noted_place, place_of, steps_text
from holdfast.local_agent.place import host_name
from holdfast.store.durable import DurableStore
from holdfast.store.location import open_durable
from holdfast.store.ram import RamStore
from holdfast.trainer.opening.ram_tier import foreign_checkpoints, ram_store

log = logging.getLogger(__name__)


def find_with_ram(
    store: DurableStore, record: RunRecord, clock: Clock, *, takeover: bool = False
) -> Finding:
    """Return the relation of a directory to the run in its record, decided by RAM. Read-only.

    Args:
        store: The directory.
        record: Its record.
        clock: The time.
        takeover: Take the directory for the run where that cannot be decided.

    Raises:
        RunBusyError: It cannot be decided, and this host's RAM has newer checkpoints of the run.
        StorageError, CheckpointDamagedError, NewerFormatError: The attempts cannot be read.
    """
    finding = find(store, record, clock)
    if finding is not Finding.DISPLACED:
        return finding
    is_moved = _has_moved(store, record, clock, takeover=takeover)
    return Finding.MOVED if is_moved else Finding.COPY


def claim_ram(store: DurableStore, record: RunRecord, clock: Clock) -> None:
    """Note beside this host's RAM that it belongs to this directory, which is about to be settled.

    So of two copies of a run that was moved, the first one that is opened gets the RAM.

    Raises:
        StorageError, CheckpointDamagedError, NewerFormatError: The attempts cannot be read.
    """
    ram = ram_store(record.run_id, host_name(), clock)
    if ram is None or _is_foreign(ram, store):
        return
    try:
        note_place(ram.root.parent, place_of(store.home))
    except OSError as error:
        log.info("the run's place is not noted beside the RAM tier: %s", error)


def _has_moved(store: DurableStore, record: RunRecord, clock: Clock, *, takeover: bool) -> bool:
    ram = ram_store(record.run_id, host_name(), clock)
    newer = _newer_in_ram(ram, store) if ram is not None else []
    if ram is None or not newer or record.place is None or _is_foreign(ram, store):
        return False
    noted = noted_place(ram.root.parent)
    search = _Search(doubt="its directory is not noted there")
    place = noted.path if noted is not None else record.place.path
    if noted is not None:
        if noted.is_at(store.home):
            return True
        if noted.identity.rpartition(":")[2] != str(record.place.inode):
            # It is RAM of another directory with this id.
            return False
        if noted.is_gone:
            return True
        search = _search(noted, store, record.run_id, clock)
    if search.doubt is None:
        return not search.is_found
    if takeover:
        return True
    raise RunBusyError(
        f"open {store.home.location_text}: it is run {record.run_id} of {place}, moved or copied, "
        f"and {search.doubt}. Only this host's RAM ({ram.root.parent}) has {steps_text(newer)} of "
        "that run. If it was moved, open it with takeover=True, and it continues from them. If it "
        f"is a copy, make {place} available and open that first, or remove them (`holdfast clean "
        "--all`)"
    )


def _is_foreign(ram: RamStore, store: DurableStore) -> bool:
    """Return whether RAM has checkpoints of an attempt that the directory does not have."""
    foreign = foreign_checkpoints(ram, store)
    if foreign:
        log.warning(
            "%s in this host's RAM (%s) are of an attempt that %s does not have; it continues "
            "without them",
            steps_text(foreign),
            ram.root.parent,
            store.home.location_text,
        )
    return bool(foreign)


def _newer_in_ram(ram: RamStore, store: DurableStore) -> Collection[CheckpointId]:
    """Return the whole checkpoints in RAM that are newer than the newest committed one."""
    newest = newest_committed(store, read_attempts(store))
    listed = list_checkpoints(ram)
    return [c for c in sorted(listed) if listed[c].parts and c.age > age_of(newest)]


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for a run's directory at its noted place, and renamed beside it.

    `doubt` is why it cannot be decided whether the directory still exists; None if it can.
    """

    is_found: bool = False
    doubt: str | None = None


def _search(noted: RamPlace, store: DurableStore, run_id: str, clock: Clock) -> _Search:
    path = Path(noted.path)
    try:
        if path.exists() and not store.home.is_at(noted.path):
            other_id = _run_id_at(noted.path, clock)
            if other_id == run_id:
                return _Search(is_found=True)
            state = path.stat()
            if other_id is None and f"{state.st_dev}:{state.st_ino}" == noted.identity:
                return _Search(doubt=f"{path} may have something left of it")
        device = path.parent.stat().st_dev
        with os.scandir(path.parent) as entries:
            beside = [e.path for e in entries if f"{device}:{e.inode()}" == noted.identity]
    except OSError as error:
        return _Search(doubt=f"{path} cannot be looked for ({error.strerror})")
    if not noted.identity.startswith(f"{device}:"):
        return _Search(doubt=f"the file system of {path} is not mounted there")
    # A file system may have given the inode to another directory meanwhile.
    return _Search(is_found=any(_run_id_at(place, clock) == run_id for place in beside))


def _run_id_at(place: str, clock: Clock) -> str | None:
    try:
        return read_run_record(open_durable(place, clock), place).run_id
    except WaitInterruptedError:
        raise
    except HoldfastError:
        return None
