"""Open a run: create or check its directory, and check that all ranks have opened the same run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.identity import settle
from holdfast.engine.lifecycle.run import create_run, read_run, read_run_record
from holdfast.errors import NotARunError, ObjectNotFoundError, StorageError
from holdfast.format.json_codec import decode
from holdfast.format.names import RUN_FILE
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal
from holdfast.job.rendezvous import Rendezvous, json_text
from holdfast.job.shared_root import Sighting, check_shared, look_for
from holdfast.store.bucket import BucketStore
from holdfast.store.durable import DurableStore
from holdfast.store.file_system import LOCAL
from holdfast.store.location import RunLocation, open_durable
from holdfast.store.object_folder import UNFINISHED, make_folder, translated

log = logging.getLogger(__name__)

OPEN_SECS = 600.0
"""How long the processes wait for each other, since some may start later than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """An open run. `group` is the random token that the processes of this start share."""

    location: RunLocation
    run_id: str
    group: str
    durable: DurableStore


def open_run(place: object, rendezvous: Rendezvous, clock: Clock) -> OpenRun:
    """Open the run at `place` on all processes; rank 0 creates it if it is missing.

    Returns:
        The open run; `run_id` and `group` are the same on all processes.

    Raises:
        NotARunError, NewerFormatError, StorageError: The directory of some process. All processes
            raise the error, which names it. Nothing was changed, except that rank 0 may have
            created a run that other hosts do not see.
        InvalidArgumentError: As `RunLocation.parse`, and as `Rendezvous.decide`.
        ProcessLostError: As `Rendezvous.decide`.
    """
    with rendezvous.propagating_errors("open the run"):
        location = RunLocation.parse(place)
        durable = open_durable(location.text, clock)
        location.make_folder()

    def opened(_: list[str]) -> str:
        return f"{_open_or_create(location, durable, clock)} {clock.new_token()}"

    run_id, _, group = rendezvous.decide("open the run", "", opened, OPEN_SECS).partition(" ")
    if rendezvous.count > 1:
        _find_on_all_hosts(run_id, durable, rendezvous, clock)
    return OpenRun(location=location, run_id=run_id, group=group, durable=durable)


def _find_on_all_hosts(
    run_id: str, durable: DurableStore, rendezvous: Rendezvous, clock: Clock
) -> None:
    def judge(values: list[str]) -> str:
        check_shared(run_id, [decode(value, Sighting) for value in values])
        return ""

    with rendezvous.propagating_errors("find the run"):
        seen = json_text(look_for(run_id, durable, clock))
    rendezvous.decide("find the run", seen, judge, OPEN_SECS)


def _open_or_create(location: RunLocation, durable: DurableStore, clock: Clock) -> str:
    if isinstance(durable, BucketStore):
        return _open_or_create_in(durable, location, clock)
    if _is_new_directory(location.folder):
        return _create(location, durable, clock)
    try:
        return settle(durable, read_run(durable, location.text), clock).run_id
    except NotARunError as error:
        if location.record.exists():
            raise
        raise _used(location) from error


def open_copy(place: object, record: RunRecord, clock: Clock) -> DurableStore:
    """Open or create the place that a run is copied to; the copy has the run's own `record`.

    Opened for training, it is recognised as a copy and becomes a run of its own.

    Raises:
        NotARunError: The place has something else, or the copy was opened for training.
        StorageError, InvalidArgumentError: The place.
    """
    location = RunLocation.parse(place)
    durable = open_durable(location.text, clock)
    location.make_folder()
    if isinstance(durable, BucketStore):
        if not durable.has_object(RUN_FILE):
            _check_unused(durable, location)
            durable.check_creation()
    elif not _is_new_directory(location.folder) and not location.record.exists():
        raise _used(location)
    durable.put_if_absent(RUN_FILE, seal(record))
    found = read_run_record(durable, location.text)
    if found != record:
        raise NotARunError(
            f"copy to {location}: expected a new place, or an unfinished copy of run "
            f"{record.run_id}, found run {found.run_id}; choose a new place"
        )
    return durable


def _used(location: RunLocation) -> NotARunError:
    return NotARunError(
        f"open {location}: expected a run or an empty directory, found files but no "
        f"{RUN_FILE}; choose a new directory, or the run's own"
    )


def _check_unused(bucket: BucketStore, location: RunLocation) -> None:
    if bucket.has_objects():
        raise NotARunError(
            f"open {location}: expected a run or an empty prefix, found objects but no "
            f"{RUN_FILE}; choose a new prefix, or the run's own"
        )


def _open_or_create_in(bucket: BucketStore, location: RunLocation, clock: Clock) -> str:
    try:
        return settle(bucket, read_run(bucket, location.text), clock).run_id
    except NotARunError:
        if bucket.has_object(RUN_FILE):
            raise
        _check_unused(bucket, location)
    bucket.check_creation()
    return _create(location, bucket, clock)


def _create(location: RunLocation, durable: DurableStore, clock: Clock) -> str:
    place = durable.home.place()
    record = create_run(durable, location.text, clock.new_token(), clock.now(), place)
    return settle(durable, record, clock).run_id


def _is_new_directory(directory: Path) -> bool:
    """Return whether the directory holds no run yet; make it then."""
    with translated("open", directory):
        if directory.exists() and not directory.is_dir():
            raise NotARunError(f"open {directory}: expected a directory, found a file")
        # A crash during the creation can leave an unfinished record and nothing else, so such a
        # directory counts as new.
        if directory.exists() and not all(map(_is_unfinished, directory.iterdir())):
            return False
    try:
        with translated("create", directory):
            make_folder(LOCAL, directory, directory.parent, durable=True)
    except ObjectNotFoundError as error:
        raise StorageError(
            f"create {directory}: the directory cannot be made there ({error.__cause__}); check "
            "the path"
        ) from error
    parents = map(str, directory.absolute().parents)
    outer = next((p for p in parents if RunLocation(p).record.is_file()), None)
    if outer is not None:
        log.warning(
            "the new run %s is inside another run, %s: what removes or copies that one also "
            "removes or copies this one; give each run a directory of its own",
            directory,
            outer,
        )
    return True


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(UNFINISHED)
