"""A run: one training effort in one durable directory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import datetime

import msgspec

from holdfast.engine.lifecycle.attempts import attempt_numbers, read_attempt
from holdfast.errors import (
    CheckpointDamagedError,
    NewerFormatError,
    NotARunError,
    ObjectNotFoundError,
    StorageError,
    StorageRefusedError,
    StorageUnreachableError,
)
from holdfast.format.names import REMOTE_FILE, RUN_FILE
from holdfast.format.records import RemoteRecord, RunPlace, RunRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.contract import ReadableStore, Store

log = logging.getLogger(__name__)


def read_run(store: ReadableStore, where: str) -> RunRecord:
    """Return the record of the run in `store`; `where` is its location, for messages.

    A damaged or missing record is reconstructed from the attempts, which contain the same fields.

    Raises:
        NotARunError: there is no run.
        NewerFormatError: the record has a newer format version.
        StorageRefusedError, StorageUnreachableError: the service refuses to read it, or is not
            there.
    """
    try:
        return read_run_record(store, where)
    except ObjectNotFoundError:
        problem = f"expected a run, with a file {RUN_FILE}, found none; check the path"
    except (StorageRefusedError, StorageUnreachableError):
        # The attempts could not be read either, with an error that says less.
        raise
    except (CheckpointDamagedError, StorageError) as error:
        problem = f"its {RUN_FILE} is not a run's record: {error}"
    record = _as_attempts_say(store)
    if record is None:
        raise NotARunError(f"open {where}: {problem}")
    log.warning("%s: %s; its id is taken from the run's attempts", where, problem)
    return record


def read_run_record(store: ReadableStore, where: str) -> RunRecord:
    """Return the run's record, without reconstruction.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError, NewerFormatError.
    """
    return unseal(store.get(RUN_FILE), RunRecord, f"{where}/{RUN_FILE}")


def mend_run(store: Store, place: RunPlace | None = None) -> Iterator[str]:
    """Rewrite a damaged run record from the attempts; yield its key if it was rewritten.

    `place` is the run's location, which the attempts do not contain.
    """
    try:
        read_run_record(store, "")
    except (CheckpointDamagedError, StorageError):
        record = _as_attempts_say(store)
        if record is not None:
            data = seal(msgspec.structs.replace(record, place=place))
            store.put(RUN_FILE, data)
            yield RUN_FILE


def _as_attempts_say(store: ReadableStore) -> RunRecord | None:
    """Return the run's record, reconstructed: the newest readable attempt's id, the oldest's time.

    In a run that began as a copy, the copied attempts have the original's id.
    """
    oldest = newest = None
    for number in attempt_numbers(store):
        with contextlib.suppress(CheckpointDamagedError, StorageError):
            newest = read_attempt(store, number)
            oldest = oldest or newest
    if oldest is None or newest is None:
        return None
    return RunRecord(run_id=newest.run_id, time=oldest.time)


def create_run(
    store: Store, where: str, run_id: str, time: datetime, place: RunPlace | None = None
) -> RunRecord:
    """Create a run in `store`, or return the record of one that another process created first."""
    store.put_if_absent(RUN_FILE, seal(RunRecord(run_id=run_id, time=time, place=place)))
    return read_run(store, where)


def note_remote(store: Store, place: str) -> None:
    """Record where the run's remote tier is."""
    if noted_remote(store) != place:
        store.put(REMOTE_FILE, seal(RemoteRecord(place=place)))


def noted_remote(store: ReadableStore) -> str | None:
    """Return where the run's remote tier is; None if it has none, or the record is damaged."""
    try:
        return unseal(store.get(REMOTE_FILE), RemoteRecord, REMOTE_FILE).place
    except ObjectNotFoundError:
        return None
    except CheckpointDamagedError as error:
        log.warning("%s; the run is shown without its remote tier", error)
        return None


def check_run(
    store: ReadableStore, where: str, run_id: str, advice: str = "stop this process"
) -> None:
    """Check that the store still belongs to that run, before a lasting write.

    Raises:
        ObjectNotFoundError: the store has no run.
        StorageError: it has another one.
    """
    try:
        present_id = read_run(store, where).run_id
    except NotARunError as error:
        raise ObjectNotFoundError(
            f"write to {where}: expected run {run_id}, found none ({error}); nothing is written"
        ) from error
    if present_id != run_id:
        raise StorageError(
            f"write to {where}: expected run {run_id}, found run {present_id}; nothing is written "
            f"there; {advice}"
        )


def deletion_text(store: ReadableStore, where: str, run_id: str) -> str | None:
    """Return that the run was deleted from `store`, and what to do; None if it is still there.

    A store that has its record or any attempt still has the run: a deletion may be under way.

    Raises:
        StorageError: the store cannot be read.
    """
    try:
        present_id = read_run_record(store, where).run_id
    except ObjectNotFoundError:
        present_id = run_id if attempt_numbers(store) else ""
    except (CheckpointDamagedError, NewerFormatError):
        present_id = run_id
    if present_id == run_id:
        return None
    replaced = f" and replaced by run {present_id}" if present_id else ""
    return (
        f"use the run {where}: it was deleted{replaced}; stop this process; what was not restored "
        "from it is lost"
    )
