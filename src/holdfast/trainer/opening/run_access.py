"""Open runs for reading, with this host's RAM tier if an agent or its leftovers hold one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from holdfast.adapt.contract import OwnProcess
from holdfast.clock import Clock, SystemClock
from holdfast.engine.lifecycle.identity import Finding
from holdfast.engine.lifecycle.run import noted_remote, read_run, read_run_record
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.tiers.shared_attempts import check_same_run
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    NotARunError,
    ObjectNotFoundError,
    RunBusyError,
    StorageError,
    translated,
)
from holdfast.format.names import CHECKPOINTS
from holdfast.format.records import RunRecord
from holdfast.local_agent.place import host_name
from holdfast.observe.events.reader import EventReader
from holdfast.store.contract import REMOTE
from holdfast.store.durable import DurableStore, RunHome
from holdfast.store.location import RunLocation, open_durable
from holdfast.store.ram import RamStore
from holdfast.store.run_directory import RunDirectory, check_link
from holdfast.trainer.opening.moved_runs import find_with_ram
from holdfast.trainer.opening.opening import open_run
from holdfast.trainer.opening.proof import note_read, place_to_read
from holdfast.trainer.opening.ram_tier import foreign_checkpoints, ram_store
from holdfast.trainer.ranks.rendezvous import Rendezvous

log = logging.getLogger(__name__)


def read_only(place: str | os.PathLike[str]) -> ReadableRun:
    """Open the run at `place`, a path or a URL, without changing anything.

    Raises:
        NotARunError, NewerFormatError, StorageError, InvalidArgumentError: The place.
    """
    clock = SystemClock()
    location = RunLocation.parse(place_to_read(place))
    durable = open_durable(_home_to_read(location), clock)
    record = read_run(durable, location.text)
    note_read(location.text)
    is_copy = _is_copy(durable, record, clock)
    _warn_if_unfinished(location, record)
    return ReadableRun(
        location=location,
        run_id=record.run_id,
        durable=durable,
        find_ram=_finder("" if is_copy else record.run_id, durable, clock),
        find_remote=lambda: None if is_copy else remote_of(durable, record.run_id, clock),
        is_copy=is_copy,
    )


def _home_to_read(location: RunLocation) -> str | RunHome:
    if location.is_url:
        return location.text
    with translated("open", location.folder):
        check_link(location.folder)
    return RunDirectory(location.folder, advice="open the run again")


def _is_copy(durable: DurableStore, record: RunRecord, clock: Clock) -> bool:
    """Return whether a place is a copy that was not opened yet, or may be one."""
    try:
        return find_with_ram(durable, record, clock) is Finding.COPY
    except (RunBusyError, StorageError, CheckpointDamagedError) as error:
        log.warning("RAM of this host is left out: %s", error)
        return True


def events_of(run: ReadableRun) -> EventReader:
    """Return the reader of all events of a run: of its own folder, and of its remote tier.

    A remote tier that cannot be opened is left out, with a warning in the log.
    """
    remote = None
    try:
        remote = run.find_remote()
    except HoldfastError as error:
        log.warning("the events of the remote tier are not read: %s", error)
    return EventReader(run.durable.home, remote=remote)


def read_damaged(place: str | os.PathLike[str]) -> tuple[ReadableRun, HoldfastError | None]:
    """Open a run read-only even if its own record is bad.

    Returns:
        The run, and the error of its record; None if the record is good.

    Raises:
        NotARunError: The place has no record and no checkpoints.
        NewerFormatError, StorageError, InvalidArgumentError: The place.
    """
    try:
        run = read_only(place)
    except NotARunError as error:
        location = RunLocation.parse(place)
        durable = open_durable(location.text, SystemClock())
        if not any(durable.list(CHECKPOINTS)):
            raise
        return ReadableRun(location=location, run_id="", durable=durable), error
    try:
        read_run_record(run.durable, run.location.text)
    except (CheckpointDamagedError, ObjectNotFoundError) as error:
        return run, error
    return run, None


def open_or_create(place: str | os.PathLike[str]) -> ReadableRun:
    """Open the run at `place`, creating it if it is missing."""
    clock = SystemClock()
    opened = open_run(place, Rendezvous(OwnProcess(), clock), clock)
    return ReadableRun(
        location=opened.location,
        run_id=opened.run_id,
        durable=opened.durable,
        find_ram=_finder(opened.run_id, opened.durable, clock),
    )


def _finder(run_id: str, durable: DurableStore, clock: Clock) -> Callable[[], RamStore | None]:
    is_logged = False

    def find_ram() -> RamStore | None:
        nonlocal is_logged
        ram = ram_store(run_id, host_name(), clock) if run_id else None
        if ram is not None and foreign_checkpoints(ram, durable):
            if not is_logged:
                log.warning(
                    "RAM of this host is left out: it has attempts of the run that %s lacks, or "
                    "has others of their numbers",
                    durable.home.location_text,
                )
            is_logged = True
            return None
        return ram

    return find_ram


def remote_of(durable: DurableStore, run_id: str, clock: Clock) -> DurableStore | None:
    """Return the remote tier that the run's directory names; None if that is not the run's.

    Raises:
        InvalidArgumentError: It is in a bucket, and obstore is not installed or not configured.
        StorageError: It cannot be read.
    """
    place = noted_remote(durable)
    if place is None:
        return None
    remote = open_durable(place, clock, tier=REMOTE)
    try:
        record = check_same_run(durable, remote, run_id)
    except (NotARunError, CheckpointDamagedError) as error:
        log.warning("the remote tier is left out: %s", error)
        return None
    _warn_if_unfinished(place, record)
    return remote


def _warn_if_unfinished(place: object, record: RunRecord) -> None:
    if record.is_unfinished_copy:
        log.warning(
            "%s is an unfinished copy, which lacks checkpoints; `holdfast copy` with the same "
            "arguments finishes it",
            place,
        )
